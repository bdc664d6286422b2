"""Where questions come from: a file, or documents about which the model writes them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from blendrag.calibrate.generate import generate_questions
from blendrag.calibrate.suitable import LEAST_QUESTIONS, REPEATS, distinct, require
from blendrag.calibrate.target import Target
from blendrag.documents import read_folder, split
from blendrag.documents.retrieve import Retriever
from blendrag.engine import BlendEngine
from blendrag.errors import DatasetError
from blendrag.evaluate.dataset import Question, load_questions
from blendrag.models import fetch
from blendrag.terminal import document_warnings


class Given:
    """Questions from a file.

    Args:
        count: most questions.
        target: what they are asked for.

    Attributes:
        repeats: questions that are there more than once, and are asked once.

    Raises:
        DatasetError: they cannot be read, or cannot prove the target.
    """

    def __init__(self, data: Path, count: int, target: Target) -> None:
        listed = load_questions(data)
        different = distinct(listed)
        self._questions = different[:count]
        self.repeats = len(listed) - len(different)
        require(self._questions, target, len(self._questions) + self.repeats, REPEATS)

    def questions(self, engine: BlendEngine) -> list[Question]:
        """The first questions, each once."""
        return self._questions


class Generated:
    """Questions that the model writes about documents; the same each time.

    Args:
        docs: a folder or a file.
        count: most questions.
        top_k, chunk_tokens: chunks in a prompt, and tokens in a chunk.

    Raises:
        DocumentError: there is nothing to read.
        ModelError: the embedder cannot be fetched.
    """

    repeats = 0

    def __init__(self, docs: Path, count: int, top_k: int, chunk_tokens: int, console: Console) -> None:
        with document_warnings(console):
            self._sources = read_folder(docs)
        fetch("minilm")
        self._count, self._top_k, self._chunk_tokens = count, top_k, chunk_tokens
        self._console = console

    def questions(self, engine: BlendEngine) -> list[Question]:
        """The questions, each with the chunks nearest to it.

        Raises:
            DatasetError: the documents are too short to ask enough about them.
        """
        chunks = [chunk for source in self._sources for chunk in split(
            source, lambda text: len(engine.tokens.chunk_ids(text)), self._chunk_tokens)]
        if len(chunks) < LEAST_QUESTIONS:
            raise DatasetError(f"the documents make {len(chunks)} chunks of {self._chunk_tokens} tokens, each for a "
                               f"question, and {LEAST_QUESTIONS} are needed: give more, or a smaller --chunk-tokens")
        with self._console.status("the model writes questions"), TemporaryDirectory() as index:
            search = Retriever(chunks, Path(index)).search
            return generate_questions(engine, chunks, search, self._count, self._top_k)
