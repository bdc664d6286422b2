"""The later turns of conversations in the HTML report: the section "Turns"."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blendrag.evaluate.metrics import first_line
from blendrag.evaluate.outcome import Outcome
from blendrag.evaluate.plots import SQUARE, Axis, Point, Series, chart
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import labelled
from blendrag.evaluate.table import NONE, between, number, seconds, share
from blendrag.evaluate.turn_summary import TurnSummary, summarise_turns
from blendrag.evaluate.turn_table import ARM_MEANINGS, COST, EARLIER_ANSWERS, TURN_COLUMNS, cost_of, notes, signed
from blendrag.evaluate.turns import ANEW, ARMS, CONTINUED

_LEAST_KL, _MOST_KL = 1e-4, 10.0


def turns_section(evaluation: Evaluation) -> str:
    """HTML; empty where no later turn was measured."""
    turns = summarise_turns(evaluation)
    if not turns:
        return ""
    legend = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>"
                     for name, meaning in (ARM_MEANINGS | TURN_COLUMNS).items())
    remarks = "".join(f'<p class="note">{escape(note)}</p>' for note in notes(turns))
    return (f"<h2>Turns</h2><p>{escape(EARLIER_ANSWERS)}</p>{remarks}{''.join(map(_table, turns))}"
            f"<details><summary>What the columns mean</summary><dl>{legend}</dl></details>"
            f"{_scatters(evaluation)}{_answers(evaluation)}")


def _table(summaries: Sequence[TurnSummary]) -> str:
    heads = "".join(f'<th title="{escape(meaning)}">{escape(name)}</th>' for name, meaning in TURN_COLUMNS.items())
    lines = []
    for at, s in enumerate(summaries):
        figures, plain = s.figures, s is summaries[0]
        compared = [NONE] * 3 if plain else [
            _cell(number(figures.kl), between(figures.ci["kl"])), share(figures.top1),
            _cell(number(figures.kl16), between(figures.ci["kl16"]))]
        f1 = _cell(number(figures.f1), "" if plain else between(figures.ci["f1"], signed=True))
        time = NONE if figures.ttft_s is None else seconds(figures.ttft_s)
        cells = [share(s.cached), share(figures.rows), f1, *compared, time]
        lines.append(f"<tr><th>{escape(labelled(figures.policy, figures.ratio))}</th><td>{'' if plain else s.arm}</td>"
                     + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        if s.arm == ANEW:
            f1, kl, kl16 = (_cell(signed(mean), between(ends, signed=True))
                            for mean, ends in cost_of(summaries[at - 1]))
            lines.append(f"<tr><th></th><td>{COST}</td><td></td><td></td><td>{f1}</td><td>{kl}</td><td></td>"
                         f"<td>{kl16}</td><td></td></tr>")
    return (f"<h3>Turn {summaries[0].turn} of {summaries[0].figures.n} conversations</h3>"
            f'<div class="wide"><table><thead><tr><th>policy</th><th></th>{heads}</tr></thead><tbody>'
            f"{''.join(lines)}</tbody></table></div>")


def _cell(figure: str, below: str) -> str:
    return f"{figure}<small>{below}</small>" if below else figure


def _scatters(evaluation: Evaluation) -> str:
    """For the first policy and each turn, the KL of the two arms, one mark a conversation."""
    first = next(setting for setting in evaluation.settings if setting.policy is not None)
    figures = []
    for turns in zip(*evaluation.turns, strict=True):
        pairs = [(turn.arms[ANEW][first.label].kl, turn.arms[CONTINUED][first.label].kl, turn) for turn in turns]
        points = [Point(anew, continued, f"{turn.follow_up.text}\nanew: {anew:.3f}  continued: {continued:.3f}")
                  for anew, continued, turn in pairs]
        x, y = (Axis(f"KL {arm}, nats (log)", _LEAST_KL, _MOST_KL, log=True) for arm in (ANEW, CONTINUED))
        title = f"turn {turns[0].number}: {first.label}, continued against anew"
        drawing = chart(title, [Series(1, points)], x, y, size=SQUARE, diagonal=True)
        farther = sum(continued > anew for anew, continued, _ in pairs)
        figures.append(f"<figure>{drawing}<figcaption>{escape(title)}: farther from plain in {farther} of {len(pairs)} "
                       "conversations</figcaption></figure>")
    return f'<div class="grid three">{"".join(figures)}</div>'


def _answers(evaluation: Evaluation) -> str:
    settings = [setting for setting in evaluation.settings if setting.policy is not None]
    heads = "".join(f"<th>{escape(setting.label)}, {arm}</th>" for setting in settings for arm in ARMS)
    lines = []
    for question, turns in zip(evaluation.questions, evaluation.turns, strict=True):
        for turn in turns:
            outcomes = [turn.arms[arm][setting.label] for setting in settings for arm in ARMS]
            cells = _answer(turn.plain, "") + "".join(_answer(one, f"KL {one.kl:.3f}") for one in outcomes)
            lines.append(f"<tr><th>{escape(turn.follow_up.text)}<small>turn {turn.number} after "
                         f"“{escape(question.text)}” · {escape('; '.join(turn.follow_up.answers) or NONE)}</small></th>"
                         f"{cells}</tr>")
    return ('<div class="wide"><table class="answers"><thead><tr><th>question</th><th>plain</th>'
            f"{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>")


def _answer(outcome: Outcome, below: str) -> str:
    right = outcome.f1 is not None and outcome.f1 > 0
    return (f'<td{" class=right" if right else ""}>{escape(first_line(outcome.text)) or NONE}'
            f"<small>{below}</small></td>")
