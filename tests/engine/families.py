"""Small random-weight models of several families, as Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
}


def build(family: str, folder: Path, tokenizer: Path) -> Path:
    """Writes a two-layer model of the family, with weights large enough that its answers vary."""
    import torch
    import transformers

    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, **settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder)
    return folder
