"""The figures as a page: curves over the rate, and over the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from blendrag.bench.load.figures import BATCH, Figures
from blendrag.bench.load.origin import Origin
from blendrag.bench.load.report import Grid, load_tables, turn_tables
from blendrag.bench.load.turns import TurnFigure
from blendrag.evaluate.page import page
from blendrag.evaluate.plots import Axis, Point, Series, chart, mark, spanning

_COLOURS = {"plain": 0, "blended": 1}
_CURVES: tuple[tuple[str, str, Callable[[Figures], float | None]], ...] = (
    ("Answers a second that meet the goal", "answers/s", lambda f: f.goodput),
    ("First token, p50", "ms", lambda f: f.ttft.p50 if f.ttft else None),
    ("First token, p95", "ms", lambda f: f.ttft.p95 if f.ttft else None),
    ("First token, p99", "ms", lambda f: f.ttft.p99 if f.ttft else None),
    ("Time per output token, p95", "ms", lambda f: f.tpot.p95 if f.tpot else None),
    ("Gaps of decoding streams, p99", "ms", lambda f: f.gaps.p99 if f.gaps else None),
    ("Gaps of decoding streams, longest", "ms", lambda f: f.gaps.longest if f.gaps else None),
    ("First token of short requests, p95", "ms", lambda f: f.probes.p95 if f.probes else None),
)


def load_page(figures: Sequence[Figures], title: str, origin: Origin) -> str:
    """The page of `bench serve`."""
    drawn = []
    for name, unit, value in _CURVES:
        lines = {arm: [(f.rate, value(f)) for f in figures if f.arm == arm] for arm in _COLOURS}
        drawn.append(_curve(name, unit, "requests/s", lines))
    steady = [_curve(f"{load}: first token, median of {BATCH} requests in turn", "ms", "requests before",
                     {f.arm: [(BATCH * number, ms) for number, ms in enumerate(f.batches_ms)]
                      for f in figures if f.load == load})
              for load in dict.fromkeys(f.load for f in figures)]
    sections = [*map(_table, load_tables(figures)), _charts("Over the rate", drawn), _charts("Over the run", steady),
                _origin(origin)]
    return page(title, "Blending under load", title, sections)


def turns_page(figures: Sequence[TurnFigure], title: str, origin: Origin) -> str:
    """The page of `bench turns`."""
    drawn = [_curve(f"Documents {style}", "ms to the first token", "turn",
                    {arm: [(f.turn, f.ttft_ms[arm]) for f in figures if f.style == style and f.turn]
                     for arm in _COLOURS}) for style in dict.fromkeys(f.style for f in figures)]
    return page(title, "Blending in conversations", title,
                [*map(_table, turn_tables(figures)), _charts("Turn by turn", drawn), _origin(origin)])


def _curve(name: str, unit: str, across: str, lines: dict[str, list[tuple[float | None, float | None]]]) -> str:
    """One chart; empty where there is nothing to draw."""
    series, xs, ys = [], [], []
    y_axis = Axis(unit, 0, 1)
    for arm, points in lines.items():
        places = [(x, y) for x, y in points if x is not None and y is not None]
        marks = [Point(x, y, f"{arm}: {x:g} {across}, {y_axis.text(y)} {unit}") for x, y in places]
        series.append(Series(_COLOURS[arm], sorted(marks, key=lambda point: point.x), joined=True))
        xs += [x for x, _ in places]
        ys += [y for _, y in places]
    if not ys:
        return ""
    drawn = chart(name, series, spanning(across, xs), spanning(unit, ys))
    return f"<figure>{drawn}<figcaption>{escape(name)}</figcaption></figure>"


def _charts(heading: str, figures: Sequence[str]) -> str:
    """A section with the charts that there is something to draw in, and what their marks mean."""
    if not any(figures):
        return ""
    keys = "".join(f'<span><svg class="key" viewBox="0 0 14 14">{mark(colour)}</svg>{arm}</span>'
                   for arm, colour in _COLOURS.items())
    return f'<h2>{heading}</h2><p class="keys">{keys}</p><div class="grid">{"".join(figures)}</div>'


def _table(grid: Grid) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in grid.columns)
    rows = "".join(f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
                   for row in grid.rows)
    notes = f'<p class="what">{escape(grid.notes)}</p>' if grid.notes else ""
    return (f'<h2>{escape(grid.title)}</h2><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}'
            f"</tbody></table></div>{notes}")


def _origin(origin: Origin) -> str:
    return (f"<h2>Measured with</h2><p><code>{escape(origin.command)}</code></p>"
            f'<p class="what">{escape(origin.line)}</p>')
