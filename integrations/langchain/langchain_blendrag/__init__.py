"""LangChain on blendrag: models that reuse the KV cache of document chunks at any place in a prompt."""

from importlib import metadata

from langchain_blendrag.chains import create_blend_documents_chain
from langchain_blendrag.chat_models import ChatBlend
from langchain_blendrag.documents import format_documents
from langchain_blendrag.embeddings import SentenceTransformerEmbeddings
from langchain_blendrag.llms import BlendLLM
from langchain_blendrag.retrievers import BlendRetriever
from langchain_blendrag.vectorstores import BlendVectorStore

__version__ = metadata.version("langchain-blendrag")

__all__ = ["BlendLLM", "BlendRetriever", "BlendVectorStore", "ChatBlend", "SentenceTransformerEmbeddings",
           "__version__", "create_blend_documents_chain", "format_documents"]
