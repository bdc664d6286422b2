"""Questions about documents, for those who have no questions of users yet."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blendrag.calibrate.suitable import distinct
from blendrag.engine import BlendEngine
from blendrag.errors import DatasetError
from blendrag.evaluate.dataset import Question
from blendrag.evaluate.prompts import as_chat
from blendrag.prompt import mark_chunks

if TYPE_CHECKING:
    from blendrag.documents import DocumentChunk

_ASK = ("Write one short question that the following text answers, for somebody who does not have the text. "
        "Reply with the question alone.\n\n{text}")
_MOST_TOKENS = 40
_TRIES = 4
"""So many chunks are asked about for each question that is wanted, at most."""

_WORDS = re.compile(r"\w+")
_ASKED = re.compile(r"^[^?\uff1f\u061f\n]*[?\uff1f\u061f]", re.MULTILINE)  # also East Asia's mark, and the Arabic one


def generate_questions(engine: BlendEngine, chunks: Sequence[DocumentChunk],
                       search: Callable[[str], Sequence[DocumentChunk]], count: int, top_k: int) -> list[Question]:
    """Lets the model ask about chunks spread at random over documents, and retrieves what it would be given.

    Where it does not write a question, what the chunk's heading names is asked for, or what it begins with.  The same
    chunks give the same questions.

    Args:
        search: all chunks, the best for a question first.
        count: questions, no two of them alike; fewer where the chunks do not give so many.
        top_k: chunks in a prompt.

    Raises:
        DatasetError: there are no chunks.
    """
    if not chunks:
        raise DatasetError("there is nothing to ask about: name a folder with documents in it")
    order = random.Random(0).sample(list(chunks), min(_TRIES * count, len(chunks)))
    found: list[Question] = []
    for start in range(0, len(order), count):  # once, unless the model asks the same about several
        asked = _ask_about(engine, order[start:start + count])
        found = distinct([*found, *(Question(text, tuple(f"{best.text}\n\n" for best in search(text)[:top_k]))
                                    for text in asked)])[:count]
        if len(found) == count:
            break
    return [replace(question, line=number) for number, question in enumerate(found, 1)]


def _ask_about(engine: BlendEngine, chunks: Sequence[DocumentChunk]) -> list[str]:
    """One question about each chunk."""
    from vllm import SamplingParams

    prompts = [as_chat(engine.tokenizer, _ASK.format(text=mark_chunks([chunk.text], separator="")), "\n\nQuestion:")
               for chunk in chunks]
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=_MOST_TOKENS), blend=False)
    return [_question(answer.text) or f"What do the documents say about “{_subject(chunk, chunks)}”?"
            for chunk, answer in zip(chunks, answers, strict=True)]


def _question(said: str) -> str:
    """The first question in what a model said, in any script; empty where there is none, or hardly one."""
    found = _ASKED.search(said)
    text = found[0].strip() if found else ""
    # Some scripts put no spaces between words.
    return text if len(_WORDS.findall(text)) > 2 or (len(text) > 5 and not text.isascii()) else ""


def _subject(chunk: DocumentChunk, among: Sequence[DocumentChunk]) -> str:
    """The chunk's heading, where no other that is asked about with it has it; its first words elsewhere."""
    alone = [other.heading for other in among].count(chunk.heading) == 1
    return chunk.heading if chunk.heading and alone else " ".join(chunk.text.split()[:8])
