"""Conversations made of a data set's questions: which question follows which, about which documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from blendrag.errors import DatasetError
from blendrag.evaluate.dataset import FollowUp, Question
from blendrag.evaluate.metrics import normalise


def conversations_of(questions: Sequence[Question], turns: int) -> list[Question]:
    """The same questions, each the first turn of a conversation.

    Where the data set holds conversations they are cut to so many turns.  Elsewhere each question is followed by those
    behind it in the set, the first ones behind the last, about the documents of all of them: what each turn takes is
    among the documents of the prompt, and no turn asks for what an earlier one has answered.

    Args:
        turns: questions of each conversation, 2 or more.

    Returns:
        Questions with `turns - 1` follow-ups each.

    Raises:
        DatasetError: a conversation is too short, or the set has too few questions to make it of.
    """
    if any(question.follow_ups for question in questions):
        return [_cut(question, turns) for question in questions]
    return [_join(list(_successors(questions, number, turns))) for number in range(len(questions))]


def _cut(question: Question, turns: int) -> Question:
    if len(question.follow_ups) < turns - 1:
        raise DatasetError(f"line {question.line} has {len(question.follow_ups)} follow_ups, {turns} turns take "
                           f"{turns - 1}: ask for fewer turns, or write more follow_ups")
    return replace(question, follow_ups=question.follow_ups[: turns - 1])


def _successors(questions: Sequence[Question], number: int, turns: int) -> Iterator[Question]:
    """The questions of the conversation that this one begins."""
    texts: set[str] = set()
    answers: set[str] = set()
    count = 0
    for question in chain(questions[number:], questions[:number]):
        right = set(map(normalise, question.answers))
        if question.text in texts or not answers.isdisjoint(right):
            continue
        yield question
        count += 1
        if count == turns:
            return
        texts.add(question.text)
        answers |= right
    raise DatasetError(f"line {questions[number].line}: the set has no {turns} questions with answers of their own for "
                       "a conversation that begins there: read more of it, ask for fewer turns, or write follow_ups")


def _join(members: Sequence[Question]) -> Question:
    """One conversation about all documents: the best of each question's, then the second of each, each once."""
    ranks = zip_longest(*(question.chunks for question in members))
    chunks = dict.fromkeys(chunk for rank in ranks for chunk in rank if chunk is not None)
    follow_ups = tuple(FollowUp(question.text, question.answers, question.instruction) for question in members[1:])
    return replace(members[0], chunks=tuple(chunks), follow_ups=follow_ups)
