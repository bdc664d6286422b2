"""The report: one HTML file with everything in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean

from blendrag import __version__
from blendrag.evaluate.blendmap import SHADES, MappedPrompt, draw
from blendrag.evaluate.metrics import first_line
from blendrag.evaluate.page import page
from blendrag.evaluate.plots import SQUARE, Axis, Point, Series, chart, mark, spanning
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import Setting, labelled, ratio_text
from blendrag.evaluate.summary import Summary
from blendrag.evaluate.table import COLUMNS, NONE, between, number, seconds, share
from blendrag.evaluate.turn_page import turns_section

_LEAST_KL, _MOST_KL = 1e-4, 10.0
_PANELS = 6


def report(title: str, evaluation: Evaluation, summaries: Sequence[Summary], mapped: MappedPrompt | None = None) -> str:
    """The page.

    Args:
        title: what was measured, on what.
        mapped: a prompt to draw as a map.
    """
    sections = [_notes(evaluation), _table(summaries), _curves(evaluation, summaries), _scatters(evaluation),
                turns_section(evaluation), _map(mapped) if mapped else "", _answers(evaluation)]
    what = f"{title} · {len(evaluation.questions)} questions · blendrag {__version__}"
    return page(title, "What blending saves, and what it costs", what, sections)


def _notes(evaluation: Evaluation) -> str:
    notes = [f"Left out: line {failure.question.line}, “{failure.question.text}”: {failure.reason}"
             for failure in evaluation.failures]
    if evaluation.interrupted:
        notes.append("Interrupted: the questions behind these were not asked.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _table(summaries: Sequence[Summary]) -> str:
    heads = "".join(f'<th title="{escape(meaning)}">{escape(name)}</th>' for name, meaning in COLUMNS.items())
    lines = []
    for number_, s in enumerate(summaries):
        plain = number_ == 0
        cells = [share(s.rows), _cell(number(s.f1), "" if plain else between(s.ci["f1"], signed=True)), share(s.em)]
        cells += [NONE] * 4 if plain else [_cell(number(s.kl), between(s.ci["kl"])), share(s.top1), number(s.kl16),
                                           share(s.same)]
        cells.append(NONE if s.ttft_s is None else seconds(s.ttft_s))
        ratio = "" if s.ratio is None else ratio_text(s.ratio)
        lines.append(f"<tr><th>{escape(s.policy)}</th><td>{ratio}</td>"
                     + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    legend = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in COLUMNS.items())
    return (f'<div class="wide"><table><thead><tr><th>policy</th><th>ratio</th>{heads}</tr></thead><tbody>'
            f'{"".join(lines)}</tbody></table></div><details><summary>What the columns mean</summary><dl>{legend}</dl>'
            "</details>")


def _cell(figure: str, below: str) -> str:
    return f"{figure}<small>{below}</small>" if below else figure


def _curves(evaluation: Evaluation, summaries: Sequence[Summary]) -> str:
    names = _names(evaluation)
    legend = "".join(f'<span><svg class="key" viewBox="0 0 14 14">{mark(colour)}</svg>{escape(name)}</span>'
                     for colour, name in enumerate(names))
    rows = "rows computed, % of a full prefill's"
    slowest = max(summary.ttft_s or 0 for summary in summaries)
    unit, factor = ("s", 1.0) if slowest >= 1 else ("ms", 1e3)
    time = f"time to the first token, {unit}"
    figures = []
    for measure, short, label in (("kl", "KL", "KL from plain, first token, nats"), ("f1", "F1", "F1 of the answers")):
        if any(getattr(summary, measure) is None for summary in summaries):
            continue
        for across, of, name, scale in (("rows", "work", rows, 100.0), ("ttft_s", "time", time, factor)):
            drawn = _curve(summaries, names, across, measure, Axis(name, 0, 1, factor=scale), label)
            figures.append(_figure(drawn, f"{short} against {of}"))
    return (f'<h2>Quality against work and time</h2><p class="keys">{legend}</p><div class="grid">{"".join(figures)}'
            "</div><p>Each mark is the mean over the questions (of times, the median); numbers beside marks are "
            "ratios. Whiskers are 95 % intervals: of the mean for KL, of the difference to plain for F1. The dashed "
            "line is plain, a full prefill.</p>")


def _curve(summaries: Sequence[Summary], names: Sequence[str], across: str, measure: str, like: Axis,
           label: str) -> str:
    plain = getattr(summaries[0], measure)
    series, ys = [], [plain]
    for colour, name in enumerate(names):
        points = []
        for s in summaries:
            if s.policy != name:
                continue
            x, y, ends = getattr(s, across), getattr(s, measure), s.ci[measure]
            if ends and measure == "f1":
                ends = plain + ends[0], plain + ends[1]
            several = sum(other.policy == name for other in summaries) > 1
            text = ratio_text(s.ratio) if several and s.ratio is not None else ""
            tip = f"{labelled(name, s.ratio)}: {like.text(x)} / {number(y)}"
            points.append(Point(x, y, tip, text, None if s is summaries[0] else ends))
            ys += [y, *(ends if ends and s is not summaries[0] else ())]
        series.append(Series(colour, sorted(points, key=lambda point: point.x), joined=True))
    xs = [getattr(summary, across) for summary in summaries]
    return chart(f"{label} against {like.label}", series, spanning(like.label, xs, factor=like.factor),
                 spanning(label, ys, zero=measure == "kl"), level=plain)


def _scatters(evaluation: Evaluation) -> str:
    first = next(setting for setting in evaluation.settings if setting.policy is not None)
    figures = []
    for other in _rivals(evaluation, first)[:_PANELS]:
        pairs = list(zip(evaluation.questions, evaluation.outcomes[first.label], evaluation.outcomes[other.label],
                         strict=True))
        better = sum(theirs.kl < mine.kl for _, mine, theirs in pairs)
        points = [Point(mine.kl, theirs.kl, f"{question.text}\n{first.label}: {mine.kl:.3f}  {other.label}: "
                        f"{theirs.kl:.3f}") for question, mine, theirs in pairs]
        x, y = (Axis(f"KL of {setting.label}, nats (log)", _LEAST_KL, _MOST_KL, log=True) for setting in (first, other))
        series = [Series(_names(evaluation).index(other.name), points)]
        drawn = chart(f"{other.label} against {first.label}", series, x, y, size=SQUARE, diagonal=True)
        figures.append(_figure(drawn, f"{other.label} is closer to plain on {better} of {len(pairs)} questions"))
    if not figures:
        return ""
    return ("<h2>Question by question</h2><p>One mark a question; below the dashed line the policy of the vertical "
            "axis is closer to the full prefill. Each policy is taken at the ratio at which it computes about as many "
            f"rows. KL below {_LEAST_KL:g} is drawn there.</p>"
            f'<div class="grid three">{"".join(figures)}</div>')


def _rivals(evaluation: Evaluation, first: Setting) -> list[Setting]:
    """Of each other policy, the setting that does about as much work as the first."""

    def work(setting: Setting) -> float:
        return fmean(outcome.rows for outcome in evaluation.outcomes[setting.label])

    groups: dict[str, list[Setting]] = {}
    for setting in evaluation.settings:
        if setting.policy is not None and setting.name != first.name:
            groups.setdefault(setting.name, []).append(setting)
    return [min(group, key=lambda setting: abs(work(setting) - work(first))) for group in groups.values()]


def _names(evaluation: Evaluation) -> list[str]:
    """Of the policies; a name's index is its colour, throughout the page."""
    return list(dict.fromkeys(setting.name for setting in evaluation.settings))


def _figure(drawn: str, caption: str) -> str:
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>"


def _map(mapped: MappedPrompt) -> str:
    shades = "".join(f'<span class="s{shade}">&nbsp;&nbsp;</span>' for shade in range(1, SHADES + 1))
    scored = mapped.stats.map is not None and any(score is not None for score in mapped.stats.map.scores)
    key = (f"Shades: the policy's score, each shade a {SHADES}th of the tokens, lowest to highest {shades}. "
           if scored else "This policy measures no scores. ")
    return (f"<h2>Blend map</h2><p>The prompt of “{escape(mapped.question)}” as {escape(mapped.setting.label)} "
            f'blended it. {key}<span class="again">Marked like this</span>: stored, but computed again. Boxes are '
            f"chunks, the rest is the application's own text. {mapped.stats.rows:.0%} of a full prefill's rows were "
            f'computed.</p><div class="map">{draw(mapped)}</div>')


def _answers(evaluation: Evaluation) -> str:
    heads = "".join(f"<th>{escape(setting.label)}</th>" for setting in evaluation.settings)
    lines = []
    for at, question in enumerate(evaluation.questions):
        cells = []
        for setting in evaluation.settings:
            outcome = evaluation.outcomes[setting.label][at]
            kl = "" if setting.policy is None else f"KL {outcome.kl:.3f}"
            right = outcome.f1 is not None and outcome.f1 > 0
            cells.append(f'<td{" class=right" if right else ""}>{escape(first_line(outcome.text)) or NONE}'
                         f"<small>{kl}</small></td>")
        known = "; ".join(question.answers) or NONE
        lines.append(f"<tr><th>{escape(question.text)}<small>{escape(known)}</small></th>{''.join(cells)}</tr>")
    return ("<h2>Every answer</h2><p>First lines; the right answers, where known, below the question. Answers that "
            'share a word with a right one are in bold.</p><div class="wide"><table class="answers"><thead><tr>'
            f"<th>question</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>")
