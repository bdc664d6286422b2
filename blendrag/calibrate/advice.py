"""What may help where no setting meets the target."""

from __future__ import annotations

from statistics import fmean

from blendrag.calibrate.points import Point
from blendrag.calibrate.search import MOST_ROWS, Calibration
from blendrag.calibrate.suitable import LEAST_QUESTIONS
from blendrag.calibrate.target import Target
from blendrag.evaluate.table import between, number, share

_SHORT_PROMPT = 1000
_SHORT_CHUNK = 400
"""Characters: about a hundred tokens."""


def advise(found: Calibration) -> list[str]:
    """Sentences, what matters most first; empty where a setting met the target."""
    if found.chosen is not None:
        return []
    control = found.control
    if control is not None and not control.meets:
        return [f"Even with everything recomputed there is {_measured(control)}: that is rounding between two ways of "
                "computing the same. Use a wider dtype, or a target that allows it."]
    worth = [p for p in found.tuning if p.rows <= MOST_ROWS]
    advice = []
    if found.check:
        failed = found.check[-1]
        advice.append(f"{failed.setting.label} met it on {found.tuning[0].n} questions (rows {failed.rows:.0%}), on "
                      f"the {failed.n} others not for sure ({_measured(failed)}). More questions would say it more "
                      "exactly.")
    elif worth:
        best = min(worth, key=lambda p: _distance(p, found.target))
        advice.append(f"The nearest was {best.setting.label}: {_measured(best)}, with {best.rows:.0%} of the rows. If "
                      "that will do, set the target to it.")
    if found.prompt_tokens < _SHORT_PROMPT:
        advice.append(f"Your prompts have {found.prompt_tokens:.0f} tokens: a full prefill of so few is quick, and "
                      "question and instruction are much of it.")
    if (length := fmean(len(c) for q in found.questions for c in q.chunks)) < _SHORT_CHUNK:
        advice.append(f"Your chunks have {length:.0f} characters: longer ones change less when their neighbours do.")
    if len(found.questions) < 2 * LEAST_QUESTIONS:
        advice.append(f"{len(found.questions)} questions prove little: give some dozens.")
    advice.append("Meanwhile KV is reused where it is exact. Requests with policy=\"exact\", reorder=True, where the "
                  "order of chunks does not matter to you, often find some.")
    return advice


def _distance(point: Point, target: Target) -> float:
    """The less, the nearer."""
    if target.max_kl is not None:
        return point.kl
    return -point.top1 if target.min_top1 is not None or point.f1 is None else -point.f1


def _measured(point: Point) -> str:
    f1 = "" if point.f1 is None else f", F1 {number(point.f1)}"
    return f"KL {number(point.kl)} ({between(point.kl_interval)}), top-1 agreement {share(point.top1)}{f1}"
