"""The summary for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.evaluate.metrics import Interval
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import ratio_text
from blendrag.evaluate.summary import Summary

NONE = "–"
COLUMNS = {
    "rows": "share of a full prefill's rows (tokens x layers) that was computed, all passes counted",
    "F1": "words of the answer's first line against the right answers; below it, the 95 % interval of the difference "
          "to plain",
    "EM": "answers that equal a right one",
    "KL": "of the first token's distribution from plain's, in nats; below it, the 95 % interval",
    "top-1": "questions on which both expect the same first token",
    "KL16": "mean KL along the first 16 tokens of the plain answer",
    "same": "questions with the very answer of plain",
    "first token": "mean time to it, one request at a time",
}


def show(console: Console, evaluation: Evaluation, summaries: Sequence[Summary], title: str) -> None:
    """The table, what its columns mean, and what went wrong."""
    console.print(table(summaries, f"{title}, {summaries[0].n} questions"))
    legend = Table.grid(padding=(0, 2))
    for name, meaning in COLUMNS.items():
        legend.add_row(Text(name, style="bold"), Text(meaning, style="dim"))
    console.print(legend)
    for failure in evaluation.failures:
        console.print(Text(f"left out: line {failure.question.line}, {failure.question.text!r}: {failure.reason}",
                           style="yellow"), soft_wrap=True)
    if evaluation.interrupted:
        console.print(Text(f"interrupted after {summaries[0].n} questions", style="yellow"))


def table(summaries: Sequence[Summary], title: str) -> Table:
    """One line for each setting, the baseline first."""
    result = Table(title=Text(title), title_justify="left", header_style="bold")
    for heading in ("policy", "ratio", *COLUMNS):
        result.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=heading != "policy")
    for s in summaries:
        ratio = NONE if s.ratio is None else ratio_text(s.ratio)
        plain = s is summaries[0]
        result.add_row(
            Text(s.policy), ratio, number(s.rows), *(
                [number(s.f1), number(s.em), NONE, NONE, NONE, NONE] if plain else
                [_over(number(s.f1), s.ci["f1"], signed=True), number(s.em), _over(number(s.kl), s.ci["kl"]),
                 number(s.top1), number(s.kl16), number(s.same)]),
            NONE if s.ttft_s is None else seconds(s.ttft_s))
    return result


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash for one that is not there."""
    return NONE if value is None else f"{value:.{digits}f}"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def between(ends: Interval | None, signed: bool = False) -> str:
    """An interval."""
    form = "{:+.2f} to {:+.2f}" if signed else "{:.2f} to {:.2f}"
    return "" if ends is None else form.format(*ends)


def _over(figure: str, ends: Interval | None, signed: bool = False) -> Text:
    return Text.assemble(figure, ("\n" + between(ends, signed) if ends else "", "dim"))
