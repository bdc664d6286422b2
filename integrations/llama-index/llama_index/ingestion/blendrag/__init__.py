"""Ingestion that computes the KV of nodes ahead of time, and deletes it with their documents."""

from llama_index.ingestion.blendrag.base import BlendIngestion

__all__ = ["BlendIngestion"]
