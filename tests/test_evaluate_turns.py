"""Later turns of conversations: figures, the table, the JSON and the HTML section, without an engine."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from blendrag.cli.eval import _told
from blendrag.errors import BlendError
from blendrag.evaluate import PLAIN, Evaluation, FollowUp, Outcome, Question, Setting, Turn, summarise, summarise_turns
from blendrag.evaluate import run as running
from blendrag.evaluate.html import report
from blendrag.evaluate.turn_table import show_turns
from blendrag.evaluate.turns import answer_ids
from blendrag.policies import CacheBlend, Query
from blendrag.prompt import BlendPrompt

SETTINGS = [Setting("default", Query(0.2)), Setting("cacheblend", CacheBlend(0.1))]
FOLLOW_UP = FollowUp("And <b>when</b>?", ("1847",))


def outcome(kl: float, **others: Any) -> Outcome:
    usual: dict[str, Any] = {"text": "1847 & on", "rows": 0.2, "ttft_s": 0.5, "top1": True, "kl16": kl / 2,
                             "same": False, "f1": 0.5, "em": 0.0}
    return Outcome(kl=kl, **(usual | others))


def turn(number: int, continued: float, anew: float) -> Turn:
    arms = {"continued": {setting.label: outcome(continued, cached=0.8, continued=continued > 0.1, rows=0.1)
                          for setting in SETTINGS},
            "anew": {setting.label: outcome(anew) for setting in SETTINGS}}
    return Turn(number, FOLLOW_UP, f"Answer {number - 1}", outcome(0, rows=1, f1=1.0, ttft_s=2), arms)


def evaluation() -> Evaluation:
    questions = [Question(f"Where {n}?", ("x",), ("Linn",), line=n) for n in (1, 2)]
    result = Evaluation((PLAIN, *SETTINGS), questions)
    result.outcomes = {setting.label: [outcome(0.1)] * 2 for setting in result.settings}
    result.turns = [[turn(2, 0.3, 0.1), turn(3, 0.5, 0.2)], [turn(2, 0.1, 0.2), turn(3, 0.4, 0.2)]]
    return result


def test_means_are_over_conversations_and_costs_are_paired() -> None:
    second, third = summarise_turns(evaluation())
    assert [(s.turn, s.arm, s.figures.policy) for s in second] == [
        (2, "plain", "plain"), (2, "continued", "default"), (2, "anew", "default"), (2, "continued", "cacheblend"),
        (2, "anew", "cacheblend")]
    plain, continued, anew, *_ = second
    assert (plain.figures.f1, plain.figures.kl, plain.cost) == (1, 0, {})
    assert (continued.cached, continued.continued, continued.figures.rows) == (0.8, 0.5, pytest.approx(0.1))
    assert (continued.figures.kl, anew.figures.kl) == (pytest.approx(0.2), pytest.approx(0.15))
    assert continued.cost == {"kl": pytest.approx(0.05), "kl16": pytest.approx(0.025), "f1": 0}
    assert continued.cost_ci["kl"] == pytest.approx((-0.1, 0.2))
    assert (anew.cost, anew.cost_ci, anew.cached) == ({}, {}, 0)
    assert continued.figures.ci["f1"] == (-0.5, -0.5), "against plain's at that turn"
    assert third[1].cost["kl"] == pytest.approx(0.25)


def test_the_tables_fit_a_terminal_and_say_what_was_not_continued() -> None:
    console = Console(file=io.StringIO(), width=80)
    show_turns(console, summarise_turns(evaluation()))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Turns: turn 2 of 2 conversations" in said
    assert "Turns: turn 3 of 2 conversations" in said
    assert "+0.050" in said
    assert "…" not in re.sub(r"\d…[+-]?\d", "", said), "nothing is cut"
    assert "turn 2, default 0.2: blended blocks of earlier turns were used in 50% of the conversations" in said
    assert "turn 3, default" not in said
    console = Console(file=io.StringIO(), width=80)
    show_turns(console, [])
    assert not console.file.getvalue()  # type: ignore[attr-defined]


def test_the_figures_file_has_turns_and_what_was_said() -> None:
    result = evaluation()
    figures = _told(result, summarise(result))
    assert [(one["turn"], one["arm"]) for one in figures["turns"]][:3] == [(2, "plain"), (2, "continued"), (2, "anew")]
    assert {"policy", "rows", "f1", "kl", "top1", "kl16", "cost", "cost_ci", "ci", "n"} < set(figures["turns"][1])
    assert figures["conversations"][0] == {"line": 1, "questions": ["Where 1?", FOLLOW_UP.text, FOLLOW_UP.text],
                                           "answers": ["Answer 1", "Answer 2"]}
    result.turns = [[], []]
    assert set(_told(result, summarise(result))) == {"policies"}


class _Balance(HTMLParser):
    """Checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_has_a_section_of_turns() -> None:
    result = evaluation()
    page = report("a title", result, summarise(result))
    reader = _Balance()
    reader.feed(page)
    assert reader.open == []
    assert "<h2>Turns</h2>" in page
    assert "Turn 3 of 2 conversations" in page
    assert "<b>" not in page
    assert "farther from plain in 1 of 2 conversations" in page
    result.turns = [[], []]
    assert "Turns" not in report("a title", result, summarise(result))


class _Engine:
    policy = Query(ratio=0.2)


@pytest.mark.parametrize("turns", [True, False])
def test_later_turns_are_measured_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, turns: bool) -> None:
    first: list[str] = []

    def measure_turns(engine: Any, question: Any, settings: Any, tokens: int, first_answer: str) -> list[Turn]:
        first.append(first_answer)
        return [turn(2, 0.1, 0.1)]

    monkeypatch.setattr(running, "measure", lambda *_: {PLAIN.label: outcome(0), "default 0.2": outcome(0.1)})
    monkeypatch.setattr(running, "measure_turns", measure_turns)
    monkeypatch.setattr(running, "_warm_up", lambda *_: None)
    result = running.evaluate(_Engine(), [Question("Where?", ("x",))], SETTINGS[:1], turns=turns)  # type: ignore[arg-type]
    assert len(result.turns[0]) == len(first) == turns
    assert first == ["1847 & on"] * turns


class _Letters:
    """An engine whose tokens are letters, but for "nA" and "d.", which are one each."""

    tokenizer = type("Tokenizer", (), {"chat_template": None})()

    def tokens(self, prompt: BlendPrompt) -> Any:
        text = prompt.text.replace("nA", "\1").replace("d.", "\2")
        return type("Tokens", (), {"ids": list(map(ord, text))})


def test_an_answer_is_forced_as_the_next_prompt_has_it() -> None:
    before = BlendPrompt("in")
    behind = BlendPrompt("in And.")
    ids = answer_ids(_Letters(), before, "And", behind)  # type: ignore[arg-type]
    assert ids == [*map(ord, " An"), 2], "what follows changes the answer's last token"
    assert answer_ids(_Letters(), before, "", BlendPrompt("in \n")) == [32, 10]  # type: ignore[arg-type]
    with pytest.raises(BlendError, match="joins the answer 'And' to what stands before it"):
        answer_ids(_Letters(), before, "And", BlendPrompt("inAnd."))  # type: ignore[arg-type]
