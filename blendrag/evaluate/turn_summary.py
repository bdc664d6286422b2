"""Means over conversations, turn by turn: what the section "Turns" of each report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blendrag.evaluate.metrics import Interval, interval, mean
from blendrag.evaluate.outcome import Outcome
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import PLAIN
from blendrag.evaluate.summary import Summary, differences, summary_of, values_of
from blendrag.evaluate.turns import ANEW, ARMS, CONTINUED, Turn


@dataclass(frozen=True)
class TurnSummary:
    """One policy in one arm, at one turn of all conversations.

    Attributes:
        turn: 2 or more.
        arm: "continued" or "anew"; "plain" for the full prefill.
        cached: share of the prompt's tokens that vLLM's prefix cache held; the mean.
        continued: share of the conversations in which blended blocks of an earlier turn were among these.
        figures: as of single questions.
        cost: "kl", "kl16" and "f1" continued less anew, conversation by conversation; the means.  Of "continued" only.
        cost_ci: 95 % bootstrap intervals of `cost`.
    """

    turn: int
    arm: str
    cached: float | None
    continued: float | None
    figures: Summary
    cost: Mapping[str, float | None] = field(default_factory=dict)
    cost_ci: Mapping[str, Interval | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"turn": self.turn, "arm": self.arm, "cached": self.cached, "continued": self.continued,
                "cost": dict(self.cost), "cost_ci": dict(self.cost_ci)} | self.figures.to_dict()


def summarise_turns(evaluation: Evaluation) -> list[list[TurnSummary]]:
    """For each turn behind the first: the full prefill, then each setting continued and anew."""
    return [_summaries(evaluation, turns) for turns in zip(*evaluation.turns, strict=True)]


def _summaries(evaluation: Evaluation, turns: Sequence[Turn]) -> list[TurnSummary]:
    number, plain = turns[0].number, [turn.plain for turn in turns]
    summaries = [TurnSummary(number, PLAIN.name, 0.0, 0.0, summary_of(PLAIN, plain, plain))]
    for setting in evaluation.settings:
        if setting.policy is None:
            continue
        outcomes = {arm: [turn.arms[arm][setting.label] for turn in turns] for arm in ARMS}
        costs = {name: differences(outcomes[CONTINUED], outcomes[ANEW], name) for name in ("kl", "kl16", "f1")}
        for arm in ARMS:
            paired = costs if arm == CONTINUED else {}
            summaries.append(TurnSummary(
                number, arm, _mean(outcomes[arm], "cached"), _mean(outcomes[arm], "continued"),
                summary_of(setting, outcomes[arm], plain), {name: mean(paired[name]) for name in paired},
                {name: interval(paired[name]) for name in paired}))
    return summaries


def _mean(outcomes: Sequence[Outcome], name: str) -> float | None:
    return mean(values_of(outcomes, name))


def transcripts(evaluation: Evaluation) -> list[dict[str, Any]]:
    """For JSON: the questions of each conversation, and the answers that its prompts held."""
    return [{"line": question.line, "questions": [question.text, *(turn.follow_up.text for turn in turns)],
             "answers": [turn.previous_answer for turn in turns]}
            for question, turns in zip(evaluation.questions, evaluation.turns, strict=True) if turns]
