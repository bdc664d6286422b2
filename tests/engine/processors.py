"""What turns requests into tokens: a tokenizer, and for multimodal models a processor around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_processor(architecture: str, tokenizer: Any, folder: Path) -> None:
    """Writes the files beside a model's weights that vLLM wants for its architecture."""
    import transformers

    if architecture.startswith("Idefics3"):
        images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 56})
        transformers.Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    elif architecture.startswith("Whisper"):
        transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
