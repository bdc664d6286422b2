"""The summary for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.evaluate.metrics import Interval
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import DEFAULT, labelled
from blendrag.evaluate.summary import Summary

NONE = "–"
_FINE = 0.01  # ends of less would look alike with two digits
COLUMNS = {
    "rows": "share of a full prefill's rows (tokens x layers) that was computed, all passes counted",
    "F1": "words of the answer's first line against the right answers; below it, the 95 % interval of the difference "
          "to plain",
    "EM": "answers that equal a right one",
    "KL": "of the first token's distribution from plain's, in nats; below it, the 95 % interval",
    "top-1": "questions on which both expect the same first token",
    "KL16": "mean KL along the first 16 tokens of the plain answer",
    "same": "questions with the very answer of plain",
    "first token": "median time to it, one request at a time",
}


def show(console: Console, evaluation: Evaluation, summaries: Sequence[Summary], title: str) -> None:
    """The table, what its columns mean, and what went wrong."""
    console.print(table(summaries, f"{title}, {summaries[0].n} questions"))
    console.print()
    legend = Table.grid(padding=(0, 2))
    for name, meaning in COLUMNS.items():
        legend.add_row(Text(name, style="bold"), Text(meaning, style="dim"))
    for setting in evaluation.settings:
        if setting.name == DEFAULT and setting.policy is not None:
            legend.add_row(Text(DEFAULT, style="bold"), Text(f"here {setting.policy.label}", style="dim"))
    console.print(legend)
    for failure in evaluation.failures:
        console.print(Text(f"left out: line {failure.question.line}, {failure.question.text!r}: {failure.reason}",
                           style="yellow"), soft_wrap=True)
    if evaluation.interrupted:
        console.print(Text(f"interrupted after {summaries[0].n} questions", style="yellow"))


def table(summaries: Sequence[Summary], title: str) -> Table:
    """One line for each setting, the baseline first; it fits 80 columns."""
    result = Table(title=Text(title), title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0),
                   show_edge=False)
    for heading in ("policy", *COLUMNS):
        result.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=heading != "policy",
                          overflow="fold")
    for s in summaries:
        compared: list[str | Text] = [NONE, NONE, NONE, NONE]
        change: Interval | None = None
        if s is not summaries[0]:
            compared = [over(number(s.kl), s.ci["kl"]), share(s.top1), number(s.kl16), share(s.same)]
            change = s.ci["f1"]
        result.add_row(Text(labelled(s.policy, s.ratio)), share(s.rows), over(number(s.f1), change, signed=True),
                       share(s.em), *compared, NONE if s.ttft_s is None else seconds(s.ttft_s))
    return result


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash for one that is not there."""
    return NONE if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """Per cent, or a dash."""
    return NONE if value is None else f"{value:.0%}"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def between(ends: Interval | None, signed: bool = False) -> str:
    """An interval."""
    if ends is None:
        return ""
    digits = 3 if max(map(abs, ends)) < _FINE else 2
    return "…".join(f"{end:{'+' if signed else ''}.{digits}f}" for end in ends)


def over(figure: str, ends: Interval | None, signed: bool = False) -> Text:
    """A figure above its interval."""
    return Text.assemble(figure, ("\n" + between(ends, signed) if ends else "", "dim"))
