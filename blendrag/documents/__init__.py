"""Reads real documents and splits them into chunks."""

from blendrag.documents.read import DocumentWarning, Source, read_folder
from blendrag.documents.split import DocumentChunk, split

__all__ = ["DocumentChunk", "DocumentWarning", "Source", "read_folder", "split"]
