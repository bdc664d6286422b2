"""One answer beside that of a full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from blendrag.evaluate.ask import Answer
from blendrag.evaluate.metrics import Distribution, divergence, exact_match, f1, first_line


@dataclass(frozen=True)
class Outcome:
    """One question, answered in one way.

    Attributes:
        text: the answer.
        rows: share of a full prefill's rows that was computed.
        ttft_s: seconds to the first token.
        kl: KL(plain || this) of the first token's distribution, in nats.
        top1: both expect the same first token most.
        kl16: mean KL over the first tokens of the plain answer, each behind those before it (`FORCED_TOKENS` at most).
        same: the answer is the plain one, token by token.
        f1, em: of the answer's first line; None where no right answer is known.
        cached, continued: see `Answer`.
    """

    text: str
    rows: float
    ttft_s: float
    kl: float
    top1: bool
    kl16: float
    same: bool
    f1: float | None
    em: float | None
    cached: float = 0.0
    continued: bool = False


def compare(full: tuple[Answer, Sequence[Distribution]], other: tuple[Answer, Sequence[Distribution]],
            references: Sequence[str]) -> Outcome:
    """An answer and what was expected along the full prefill's, against those of the full prefill.

    Args:
        references: right answers; may be empty.
    """
    along = [divergence(p, q) for p, q in zip(full[1], other[1], strict=True)]
    given = other[0]
    said = first_line(given.text)
    return Outcome(
        text=given.text, rows=given.rows, ttft_s=given.first_token_s, kl=along[0], kl16=fmean(along),
        top1=full[1][0].likeliest == other[1][0].likeliest, same=given.token_ids == full[0].token_ids,
        f1=f1(said, references) if references else None, em=exact_match(said, references) if references else None,
        cached=given.cached, continued=given.continued)
