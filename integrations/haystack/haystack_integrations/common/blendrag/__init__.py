"""What the Haystack components of blendrag share."""

from haystack_integrations.common.blendrag.documents import chunk_texts
from haystack_integrations.common.blendrag.engine import EngineHandle

__all__ = ["EngineHandle", "chunk_texts"]
