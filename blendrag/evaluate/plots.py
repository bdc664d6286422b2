"""Scatter plots as SVG, drawn with CSS classes of report.css; the colours follow the reader's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDE, SQUARE = (460, 300), (360, 350)
"""Sizes of a chart."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 12, 46
_LABEL_HEIGHT, _LETTER_WIDTH, _BESIDE = 13, 6.2, 4
COLOURS = 8
"""Colours that report.css defines; further series begin again."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what is measured, with its unit.
        low, high: of the data that must be seen.
        log: logarithmic; `low` is positive, and smaller values are drawn there.
        factor: ticks are labelled with their value times this (100 for per cent).
    """

    label: str
    low: float
    high: float
    log: bool = False
    factor: float = 1.0

    def share(self, value: float) -> float:
        """Where along the axis a value is, 0 to 1."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values, about five."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1)]
        step = _round_step((self.high - self.low) / 6)
        return [number * step for number in range(math.ceil(self.low / step - 1e-9),
                                                  math.floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        """A tick's label."""
        return f"{value * self.factor:.6g}"


@dataclass(frozen=True)
class Point:
    """One mark: where it is, the ends of its whisker, what stands beside it, and what shows when one points at it."""

    x: float
    y: float
    tip: str
    label: str = ""
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Marks of one colour and shape, joined by a line where `joined`."""

    colour: int
    points: Sequence[Point]
    joined: bool = False


def spanning(label: str, values: Sequence[float], *, zero: bool = True, factor: float = 1.0) -> Axis:
    """A linear axis that holds values with some room, from zero on where that is wanted."""
    low, high = min(values), max(values)
    room = 0.08 * ((high - (0 if zero else low)) or abs(high) or 1)
    return Axis(label, 0.0 if zero else max(0.0, low - room), high + room, factor=factor)


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, size: tuple[int, int] = WIDE,
          level: float | None = None, diagonal: bool = False) -> str:
    """An SVG element.

    Args:
        title: for screen readers.
        level: a dashed line at this y.
        diagonal: a dashed line where both axes have the same value.
    """
    place = _Place(x, y, size)
    parts = [f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(title)}">', *_frame(place)]
    if level is not None:
        parts.append(f'<line class="level" x1="{place.left}" x2="{place.right}" y1="{place.y(level):.1f}" '
                     f'y2="{place.y(level):.1f}"/>')
    if diagonal:
        ends = max(x.low, y.low), min(x.high, y.high)
        (x1, y1), (x2, y2) = ((place.x(end), place.y(end)) for end in ends)
        parts.append(f'<line class="level" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for one in series:
        parts += _marks(place, one)
    parts += _labels(place, series)
    return "".join([*parts, "</svg>"])


def mark(colour: int, x: float = 7, y: float = 7) -> str:
    """The mark of a series: colour and shape, so that one needs not tell colours apart."""
    shapes = ('<circle r="4.5"/>', '<rect x="-4" y="-4" width="8" height="8"/>', '<path d="M0-5.5 5 4-5 4z"/>',
              '<path d="M0-5.5 5.5 0 0 5.5-5.5 0z"/>', '<path d="M0 5.5 5-4-5-4z"/>',
              '<path d="M-5-1.7h3.3V-5h3.4v3.3H5v3.4H1.7V5h-3.4V1.7H-5z"/>')
    shape = shapes[colour % len(shapes)]
    return f'<g class="mark c{colour % COLOURS}" transform="translate({x:.1f} {y:.1f})">{shape}</g>'


class _Place:
    """From values to pixels."""

    def __init__(self, x: Axis, y: Axis, size: tuple[int, int]) -> None:
        self.x_axis, self.y_axis = x, y
        self.left, self.right = _LEFT, size[0] - _RIGHT
        self.top, self.bottom = _TOP, size[1] - _BOTTOM

    def x(self, value: float) -> float:
        return self.left + self.x_axis.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.y_axis.share(value) * (self.bottom - self.top)


def _frame(place: _Place) -> list[str]:
    parts = []
    for value in place.x_axis.ticks():
        at = place.x(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{place.top}" y2="{place.bottom}"/>'
                     f'<text class="tick" x="{at:.1f}" y="{place.bottom + 16}" text-anchor="middle">'
                     f'{place.x_axis.text(value)}</text>')
    for value in place.y_axis.ticks():
        at = place.y(value)
        parts.append(f'<line class="grid" x1="{place.left}" x2="{place.right}" y1="{at:.1f}" y2="{at:.1f}"/>'
                     f'<text class="tick" x="{place.left - 6}" y="{at + 4:.1f}" text-anchor="end">'
                     f'{place.y_axis.text(value)}</text>')
    middle_x, middle_y = (place.left + place.right) / 2, (place.top + place.bottom) / 2
    for label, room, where in (
            (place.x_axis.label, place.right - place.left, f'x="{middle_x}" y="{place.bottom + 38}"'),
            (place.y_axis.label, place.bottom - place.top,
             f'x="14" y="{middle_y}" transform="rotate(-90 14 {middle_y})"')):
        # Squeezed where it is longer than the axis, as a policy with many settings is.
        fit = f' textLength="{room}" lengthAdjust="spacingAndGlyphs"' if _LETTER_WIDTH * len(label) > room else ""
        parts.append(f'<text class="axis" {where} text-anchor="middle"{fit}>{escape(label)}</text>')
    return parts


def _marks(place: _Place, series: Series) -> list[str]:
    colour = f"c{series.colour % COLOURS}"
    parts = []
    if series.joined and len(series.points) > 1:
        path = " ".join(f"{place.x(point.x):.1f},{place.y(point.y):.1f}" for point in series.points)
        parts.append(f'<polyline class="path {colour}" points="{path}"/>')
    for point in series.points:
        if point.ends:
            at, low, high = place.x(point.x), place.y(point.ends[0]), place.y(point.ends[1])
            parts.append(f'<path class="whisker {colour}" d="M{at - 3:.1f} {low:.1f}h6m-3 0V{high:.1f}m-3 0h6"/>')
    parts += [f'<g><title>{escape(point.tip)}</title>{mark(series.colour, place.x(point.x), place.y(point.y))}</g>'
              for point in series.points]
    return parts


def _labels(place: _Place, series: Sequence[Series]) -> list[str]:
    """Text beside the marks, moved down until no two overlap; left out where that would be below the chart."""
    taken: list[tuple[float, float, float]] = []
    parts = []
    for point in sorted((point for one in series for point in one.points if point.label), key=lambda p: place.y(p.y)):
        width = _LETTER_WIDTH * len(point.label)
        x, y = place.x(point.x) + 9, place.y(point.y) + _BESIDE
        if x + width > place.right:
            x -= 18 + width
        while any(x < end and begin < x + width and abs(y - other) < _LABEL_HEIGHT for begin, end, other in taken):
            y += _LABEL_HEIGHT
        if y > place.bottom + _BESIDE:
            continue
        taken.append((x, x + width, y))
        parts.append(f'<text class="label" x="{x:.1f}" y="{y:.1f}">{escape(point.label)}</text>')
    return parts


def _round_step(step: float) -> float:
    """The next larger of 1, 2, 2.5, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
