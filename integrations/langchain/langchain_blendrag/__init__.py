"""LangChain on blendrag: models that reuse the KV cache of document chunks at any place in a prompt."""

from importlib import metadata

from langchain_blendrag.chat_models import ChatBlend
from langchain_blendrag.documents import format_documents
from langchain_blendrag.embeddings import SentenceTransformerEmbeddings
from langchain_blendrag.llms import BlendLLM
from langchain_blendrag.retrievers import BlendRetriever

__version__ = metadata.version("langchain-blendrag")

__all__ = ["BlendLLM", "BlendRetriever", "ChatBlend", "SentenceTransformerEmbeddings", "__version__",
           "format_documents"]
