"""blendrag: reuse the KV cache of document chunks at any place in a prompt, inside an unmodified vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vllm import SamplingParams

    from blendrag.async_engine import AsyncBlendEngine
    from blendrag.config import DELIMITER, BlendConfig
    from blendrag.engine import BlendEngine
    from blendrag.guard import Quality, QualityGuard
    from blendrag.outputs import BlendOutput, EncodedChunk
    from blendrag.prompt import BlendPrompt, Chunk, mark_chunks, strip_marks
    from blendrag.stats import BlendStats, ChunkStats, EngineStats
    from blendrag.store import ChunkStore

_HOMES = {
    "BlendConfig": "blendrag.config", "DELIMITER": "blendrag.config",
    "BlendEngine": "blendrag.engine", "AsyncBlendEngine": "blendrag.async_engine",
    "Quality": "blendrag.guard", "QualityGuard": "blendrag.guard",
    "BlendOutput": "blendrag.outputs", "EncodedChunk": "blendrag.outputs",
    "BlendPrompt": "blendrag.prompt", "Chunk": "blendrag.prompt", "mark_chunks": "blendrag.prompt",
    "strip_marks": "blendrag.prompt",
    "BlendStats": "blendrag.stats", "ChunkStats": "blendrag.stats", "EngineStats": "blendrag.stats",
    "ChunkStore": "blendrag.store",
    "SamplingParams": "vllm",
}

__all__ = ["DELIMITER", "AsyncBlendEngine", "BlendConfig", "BlendEngine", "BlendOutput", "BlendPrompt", "BlendStats",
           "Chunk", "ChunkStats", "ChunkStore", "EncodedChunk", "EngineStats", "Quality", "QualityGuard",
           "SamplingParams", "__version__", "mark_chunks", "strip_marks"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `import blendrag` loads neither torch nor vLLM."""
    if name not in _HOMES:
        raise AttributeError(f"module 'blendrag' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
