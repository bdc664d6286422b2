"""The curve and the verdict, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.calibrate.points import Point, frontier
from blendrag.calibrate.search import Calibration
from blendrag.evaluate.settings import ratio_text
from blendrag.evaluate.table import NONE, between, number, share

_BAR = 18
_ROOM = 3
"""The bars go up to so many times the largest KL that is allowed."""


def show(console: Console, found: Calibration, advice: Sequence[str]) -> None:
    """What was measured, what was chosen, and what may help where nothing was."""
    tuning = found.tuning
    n = tuning[0].n
    console.print(Text(f"{len(found.questions)} questions, prompts of {found.prompt_tokens:,.0f} tokens; wanted: "
                       f"{found.target}"))
    console.print()
    console.print(_table(tuning, f"On {n} questions, by what they cost", found.target.max_kl))
    if found.control is not None:
        console.print(Text(f"KL with everything recomputed: {number(found.control.kl, 4)}", style="dim"))
    if found.check:
        console.print()
        console.print(_table(found.check, f"On the {found.check[0].n} others, until one fails", found.target.max_kl))
    console.print(Text("n-m %: attention is measured in other layers than query's own, and averaged; moved: what is "
                       "not recomputed moves along, as with query; dim: another setting is better with fewer rows",
                       style="dim"))
    console.print()
    if found.repeats:
        console.print(Text(f"{found.repeats} questions came again and were asked once", style="yellow"))
    for failure in found.failures:
        console.print(Text(f"left out: line {failure.question.line}, {failure.question.text!r}: {failure.reason}",
                           style="yellow"), soft_wrap=True)
    if (chosen := found.chosen) is not None:
        console.print(Text.assemble(
            ("chosen: ", "bold green"), (chosen.setting.label, "bold"),
            f", {share(chosen.rows)} of a full prefill's rows, KL {number(chosen.kl)} "
            f"({between(chosen.kl_interval)}), top-1 agreement {share(chosen.top1)}"), soft_wrap=True)
        return
    console.print(Text.assemble(("No setting is good enough: ", "bold yellow"),
                                "blending stays off for this model, but for what is exact."), soft_wrap=True)
    for sentence in advice:
        console.print(Text(f"- {sentence}"), soft_wrap=True)


def _table(points: Sequence[Point], title: str, max_kl: float | None) -> Table:
    with_f1 = any(p.f1 is not None for p in points)
    result = Table(title=Text(title), title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0),
                   show_edge=False)
    result.add_column("policy")
    for heading in ("ratio", "rows", "KL", "90 %", "top-1", *(["F1"] if with_f1 else [])):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("" if max_kl is None else "│ is what is allowed", no_wrap=True)
    best = set(frontier(points))
    most = max(p.kl for p in points) if max_kl is None else _ROOM * max_kl
    for p in points:
        f1 = [number(p.f1)] if with_f1 else []
        label = Text(p.setting.name, style="" if p in best else "dim")
        ratio = NONE if p.setting.ratio is None else ratio_text(p.setting.ratio)
        result.add_row(label, ratio, share(p.rows), number(p.kl), between(p.kl_interval) or NONE, share(p.top1), *f1,
                       _bar(p, most, max_kl))
    return result


def _bar(p: Point, most: float, max_kl: float | None) -> Text:
    """A bar of the KL, cut off at `most`, green where the target is met, with a mark at what is allowed."""
    filled = min(_BAR, round(_BAR * p.kl / most)) if most > 0 else 0
    cells = ["█"] * filled + [" "] * (_BAR - filled)
    if max_kl is not None:
        cells[min(_BAR - 1, round(_BAR * max_kl / most))] = "│"
    more = "…" if p.kl > most else " "
    return Text("".join(cells) + more, style="green" if p.meets else "red")
