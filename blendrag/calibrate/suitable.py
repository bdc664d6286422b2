"""Which questions a search can use."""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.calibrate.proof import fewest_for
from blendrag.calibrate.target import Target
from blendrag.errors import DatasetError
from blendrag.evaluate.dataset import Question

LEAST_QUESTIONS = 10

REPEATS = "the others came before"
"""Why the rest of `distinct` is left out."""


def distinct(questions: Sequence[Question]) -> list[Question]:
    """Each question once, in whatever order its chunks come: one in both halves would prove little."""
    found: dict[tuple[object, ...], Question] = {}
    for question in questions:
        found.setdefault((question.text, frozenset(question.chunks), question.instruction), question)
    return list(found.values())


def require(questions: Sequence[Question], target: Target, given: int, why: str) -> None:
    """Complains of questions that cannot prove a target, whatever the answers.

    Args:
        questions: those that can be asked.
        given: how many there were.
        why: what became of the others, if there are any.

    Raises:
        DatasetError: too few, or one without an answer where the target is about F1.
    """
    if target.min_f1 is not None and (bare := next((q for q in questions if not q.answers), None)) is not None:
        raise DatasetError(f"the question in line {bare.line} has no answers, which min_f1 needs: add them, or give "
                           "max_kl instead")
    many = f"{len(questions)} of {given} questions can be asked{f' ({why})' if len(questions) < given else ''}"
    if len(questions) < LEAST_QUESTIONS:
        raise DatasetError(f"{many}, and {LEAST_QUESTIONS} are needed: give more")
    if target.min_top1 is not None and len(questions) < (least := 2 * fewest_for(target.min_top1)):
        raise DatasetError(f"{many}, and a top-1 agreement of {target.min_top1:g} takes {least} to prove, even if all "
                           "agree: give more (--questions), or a lower min_top1")
