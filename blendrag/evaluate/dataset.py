"""Questions with their documents, from a JSON list or from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from blendrag.errors import DatasetError

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class FollowUp:
    """A further question of a conversation, about the documents that are in the prompt already.

    Attributes:
        text: the question.
        answers, instruction: as a `Question` has them.
    """

    text: str
    answers: tuple[str, ...] = ()
    instruction: str | None = None


@dataclass(frozen=True)
class Question:
    """One question and what was retrieved for it.

    Attributes:
        text: the question.
        chunks: the documents' texts, in the order of the prompt, each exactly as it stands there.
        answers: any of them is right; empty where none is known.
        instruction: how to answer, instead of the usual five words.
        line: where it stands in the file.
        follow_ups: what is asked next, in the same conversation.
    """

    text: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...] = ()
    instruction: str | None = None
    line: int = 0
    follow_ups: tuple[FollowUp, ...] = ()


def load_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Reads a data set.

    An entry is `{"ctxs": [{"title": ..., "text": ...}, ...], "question": ..., "answers": [...]}`, as MuSiQue and
    HotpotQA are passed around.  Documents may be plain texts, `answer` may stand for `answers`, and both may be
    missing; `instruction` is optional, and other fields are ignored.  An entry that begins a conversation has
    `follow_ups`, a list of further questions: texts, or objects with `question` and perhaps `answers` and
    `instruction`.  The file is a JSON list of entries, or one entry a line.

    Args:
        limit: read no more than the first so many.

    Raises:
        DatasetError: a file that cannot be read, or an entry that is not of this form; names the line and the field.
    """
    try:
        text = path.expanduser().read_text("utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from error
    entries = _listed(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    questions = [_question(entry, line, f"{path}, line {line}") for line, entry in islice(entries, limit)]
    if not questions:
        raise DatasetError(f"{path} holds no questions: give it a JSON list of entries, or one entry a line")
    return questions


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    """The same questions, the documents of each in another order, as the next retrieval may return them."""
    random, found = Random(seed), []
    for question in questions:
        chunks = list(question.chunks)
        random.shuffle(chunks)
        found.append(replace(question, chunks=tuple(chunks)))
    return found


def _listed(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON list, each with the line where it begins."""
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is not JSON ({error}): mend it there, or write one entry a line") from error
    decoder = json.JSONDecoder()
    at, line, counted = text.index("[") + 1, 1, 0
    while True:
        while text[at] in _SPACE + ",":
            at += 1
        if text[at] == "]":
            return
        line, counted = line + text.count("\n", counted, at), at
        entry, at = decoder.raw_decode(text, at)
        yield line, entry


def _lines(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    for line, content in enumerate(text.split("\n"), 1):  # a JSON text may hold other line separators
        if not content.strip():
            continue
        try:
            yield line, json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}, line {line}: this is not JSON ({error}): write a JSON list of entries, or one "
                               "entry a line") from error


def _question(entry: Any, line: int, where: str) -> Question:
    if not isinstance(entry, Mapping):
        raise DatasetError(f"{where}: an entry is an object, not {_kind(entry)}: write "
                           '{"question": ..., "ctxs": [...], "answers": [...]}')
    if "question" not in entry or "ctxs" not in entry:
        missing = "question" if "question" not in entry else "ctxs"
        raise DatasetError(f"{where}: {missing} is missing: an entry has a question and the documents retrieved for it "
                           "(ctxs)")
    documents = entry["ctxs"]
    if not isinstance(documents, list) or not documents:
        raise DatasetError(f"{where}: ctxs is {_kind(documents)}: give a list of at least one document")
    chunks = tuple(_chunk(document, f"{where}: ctxs[{number}]") for number, document in enumerate(documents))
    follow_ups = entry.get("follow_ups")
    if follow_ups is None:
        follow_ups = []
    if not isinstance(follow_ups, list):
        raise DatasetError(f"{where}: follow_ups is {_kind(follow_ups)}: give a list of further questions")
    return Question(_text(entry["question"], f"{where}: question"), chunks, _answers(entry, where),
                    _instruction(entry, where), line,
                    tuple(_follow_up(one, f"{where}: follow_ups[{n}]") for n, one in enumerate(follow_ups)))


def _follow_up(entry: Any, where: str) -> FollowUp:
    if not isinstance(entry, Mapping):
        return FollowUp(_text(entry, where))
    if "question" not in entry:
        raise DatasetError(f"{where}.question is missing: a follow-up is a text, or an object with question and "
                           "perhaps answers")
    return FollowUp(_text(entry["question"], f"{where}.question"), _answers(entry, where), _instruction(entry, where))


def _instruction(entry: Mapping[str, Any], where: str) -> str | None:
    instruction = entry.get("instruction")
    return None if instruction is None else _text(instruction, f"{where}: instruction")


def _chunk(document: Any, where: str) -> str:
    """A document as it stands in a prompt.  An empty title leaves its empty lines, as in MuSiQue's usual prompts."""
    if not isinstance(document, Mapping):
        return f"{_text(document, where)}\n\n"
    if "text" not in document:
        raise DatasetError(f"{where}.text is missing: a document is a text, or an object with text and perhaps title")
    text = _text(document["text"], f"{where}.text")
    title = document.get("title")
    if title is None:
        return f"{text}\n\n"
    if not isinstance(title, str):
        raise DatasetError(f"{where}.title is {_kind(title)}: give a text, or leave it out")
    return f"{_whole(title, f'{where}.title')}\n\n{text}\n\n"


def _answers(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    name = "answers" if entry.get("answers") is not None else "answer"
    given = entry.get(name)
    if given is None:
        return ()
    if isinstance(given, list):
        return tuple(_text(answer, f"{where}: {name}[{number}]") for number, answer in enumerate(given))
    return (_text(given, f"{where}: {name}"),)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{where} is {_kind(value)}: give a text")
    return _whole(value, where)


def _whole(value: str, where: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DatasetError(f"{where} holds half a character (a lone surrogate, as of a text cut by UTF-16): mend it")
    return value


def _kind(value: Any) -> str:
    if value in ("", [], {}) or (isinstance(value, str) and not value.strip()):
        return "empty"
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
