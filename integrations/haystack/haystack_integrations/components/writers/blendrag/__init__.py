"""Haystack document writer of blendrag."""

from haystack_integrations.components.writers.blendrag.document_writer import BlendDocumentWriter

__all__ = ["BlendDocumentWriter"]
