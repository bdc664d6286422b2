"""Figures of loads and of conversations as tables, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.bench.load.figures import BATCH, Figures, Quantiles
from blendrag.bench.load.turns import Style, TurnFigure

NONE = "–"
_GAIN = "gain"
_GAIN_NOTE = "gain: how many times faster, or more, blended is"


@dataclass
class Grid:
    """A table.

    Attributes:
        notes: what its columns mean.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: str = ""


def load_tables(figures: Sequence[Figures]) -> list[Grid]:
    """What a load gives: speed, its effect on others, where tokens came from.

    Args:
        figures: plain and blended in turn, load by load.
    """
    grids = [_speed(figures)]
    if any(figure.gaps or figure.probes for figure in figures):
        grids.append(_others(figures))
    return [*grids, _ledger(figures)]


def turn_tables(figures: Iterable[TurnFigure]) -> list[Grid]:
    """First tokens turn by turn, a table for each style."""
    grids: dict[Style, Grid] = {}
    for figure in figures:
        grid = grids.setdefault(figure.style, Grid(
            f"First token of each turn, documents {figure.style}",
            ("turn", "prompt tokens", "plain ms", "blended ms", _GAIN, "computed, plain", "computed, blended")))
        grid.rows.append((str(figure.turn or "all"), f"{figure.prompt_tokens:,.0f}",
                          *(f"{figure.ttft_ms[arm]:.0f}" for arm in ("plain", "blended")), f"{figure.ratio:.2f}",
                          *(f"{figure.computed[arm]:.0%}" for arm in ("plain", "blended"))))
    return list(grids.values())


def show(console: Console, grids: Iterable[Grid]) -> None:
    """Prints tables."""
    for grid in grids:
        table = Table(title=grid.title, title_justify="left")
        for number, column in enumerate(grid.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
        if grid.notes:
            console.print(Text(grid.notes, style="dim"))


def _speed(figures: Sequence[Figures]) -> Grid:
    grid = Grid("Speed", ("load", "arm", "failed", "answers/s", "good/s", *_columns("first token"),
                          *_columns("per token")),
                notes=f"milliseconds, percentiles of the requests; good: answers that meet the goal; {_GAIN_NOTE}")
    for plain, blended in _pairs(figures):
        for figure in (plain, blended):
            grid.rows.append((figure.load, figure.arm, str(figure.failed), f"{figure.throughput:.2f}",
                              f"{figure.goodput:.2f}", *_cells(figure.ttft), *_cells(figure.tpot)))
        grid.rows.append(("", _GAIN, "", _ratio(blended.throughput, plain.throughput),
                          _ratio(blended.goodput, plain.goodput), *_ratios(plain.ttft, blended.ttft),
                          *_ratios(plain.tpot, blended.tpot)))
    if failure := next((figure.failure for figure in figures if figure.failure), ""):
        grid.notes += f"; the first failure: {failure}"
    return grid


def _others(figures: Sequence[Figures]) -> Grid:
    grid = Grid("Beside the requests", ("load", "arm", *_columns("gap"), "longest", *_columns("probe")),
                notes="milliseconds; gap: between tokens of streams that decode; probe: first token of short requests; "
                      + _GAIN_NOTE)
    for pair in _pairs(figures):
        for figure in pair:
            longest = f"{figure.gaps.longest:.0f}" if figure.gaps else NONE
            grid.rows.append((figure.load, figure.arm, *_cells(figure.gaps), longest, *_cells(figure.probes)))
        plain, blended = pair
        longest = _ratio(plain.gaps.longest, blended.gaps.longest) if plain.gaps and blended.gaps else ""
        grid.rows.append(("", _GAIN, *_ratios(plain.gaps, blended.gaps), longest,
                          *_ratios(plain.probes, blended.probes)))
    return grid


def _ledger(figures: Sequence[Figures]) -> Grid:
    grid = Grid("Where the prompt tokens came from",
                ("load", "arm", "prompt tokens", "computed", "prefix cache", "reused", "rows", "last 20 / first 20"),
                notes="rows: share of a full prefill's rows that was computed, scoring included; last 20 / first 20: "
                      f"median time to the first token of the last {BATCH} requests over that of the first {BATCH}")
    for figure in figures:
        ledger = figure.ledger
        grid.rows.append((figure.load, figure.arm, f"{ledger.prompt:,}", f"{ledger.computed:,}", f"{ledger.cached:,}",
                          "not separate" if ledger.reused is None else f"{ledger.reused:,}",
                          NONE if figure.rows is None else f"{figure.rows:.3f}",
                          NONE if figure.slowdown is None else f"{figure.slowdown:.2f}"))
    return grid


def _pairs(figures: Sequence[Figures]) -> Iterable[tuple[Figures, Figures]]:
    return zip(figures[::2], figures[1::2], strict=True)


def _columns(name: str) -> tuple[str, str, str]:
    return f"{name} p50", "p95", "p99"


def _cells(quantiles: Quantiles | None) -> tuple[str, ...]:
    if quantiles is None:
        return (NONE,) * 3
    return tuple(f"{value:.0f}" if value >= 100 else f"{value:.1f}"
                 for value in (quantiles.p50, quantiles.p95, quantiles.p99))


def _ratios(plain: Quantiles | None, blended: Quantiles | None) -> tuple[str, ...]:
    if plain is None or blended is None:
        return ("",) * 3
    return tuple(_ratio(getattr(plain, name), getattr(blended, name)) for name in ("p50", "p95", "p99"))


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}" if below else ""
