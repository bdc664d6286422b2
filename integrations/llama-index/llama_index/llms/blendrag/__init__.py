"""LlamaIndex on blendrag: a model that reuses the KV cache of document chunks at any place in a prompt."""

from llama_index.llms.blendrag.base import BlendLLM

__all__ = ["BlendLLM"]
