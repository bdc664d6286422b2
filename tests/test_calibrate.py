"""The search for a policy, with answers whose quality is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from blendrag.calibrate import Calibration, Point, Target, calibrate, search
from blendrag.calibrate.advice import advise
from blendrag.calibrate.candidates import CHEAPEST, FAMILIES, RATIOS
from blendrag.calibrate.generate import _question, _subject
from blendrag.calibrate.measure import Answered
from blendrag.calibrate.points import frontier, point
from blendrag.calibrate.report import show
from blendrag.documents import DocumentChunk
from blendrag.errors import BlendError, ConfigError, DatasetError, EngineClosedError
from blendrag.evaluate import PLAIN, Question, Setting
from blendrag.policies import Full, NoRecompute, Query

QUESTIONS = [Question(f"Question {line}?", ("a text. " * 100,) * 4, ("yes",), line=line) for line in range(1, 41)]
Quality = Callable[[Setting, Question, np.random.Generator], tuple[float, float]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Quality], None]:
    """Lets questions be answered as a function of setting and question says: `(rows, KL)`."""

    def use(quality: Quality) -> None:
        class Known:
            def __init__(self, engine: Any, *, with_f1: bool) -> None:
                self._random = np.random.default_rng(0)
                self._known: dict[tuple[Question, str], Answered] = {}

            def ask(self, question: Question, settings: Sequence[Setting]) -> None:
                for setting in (PLAIN, *settings):
                    rows, kl = quality(setting, question, self._random) if setting.policy else (1.0, 0.0)
                    self._known.setdefault((question, setting.label), Answered(rows, kl, kl < 0.2, 1.0 - kl / 2))

            def of(self, setting: Setting, questions: Sequence[Question]) -> list[Answered]:
                return [self._known[question, setting.label] for question in questions]

            def prompt_tokens(self, question: Question) -> int:
                return 2000

        monkeypatch.setattr(search, "Answers", Known)

    return use


def usual(setting: Setting, question: Question, random: np.random.Generator,
          scale: float = 0.05) -> tuple[float, float]:
    """A KL that falls with the ratio, and less of it in the layers at 66 to 80 %."""
    if isinstance(setting.policy, Full):
        return 1.0, 1e-3 * scale
    ratio = setting.ratio if isinstance(setting.ratio, float) else 0.01
    best = isinstance(setting.policy, Query) and setting.policy.layers == (0.66, 0.8)
    return 0.02 + 0.9 * ratio, scale * (0.5 if best else 1.0) / (ratio + 0.05) * random.exponential()


def found_for(target: Target, questions: Sequence[Question] = QUESTIONS) -> Calibration:
    return calibrate(None, questions, target)  # type: ignore[arg-type]


def test_the_cheapest_setting_that_meets_the_target_is_found(answers: Any) -> None:
    answers(lambda setting, question, random: usual(setting, question, random))
    found = found_for(Target(max_kl=0.2))
    assert found.chosen is not None
    policy = found.chosen.setting.policy
    assert isinstance(policy, Query)
    assert policy.layers == (0.66, 0.8)
    assert 0.1 <= policy.ratio <= 0.32  # the mean of 20 falls below .2 at about .08
    assert found.chosen is [p for p in found.check if p.meets][-1]
    assert found.chosen.kl_interval[1] <= 0.2
    assert found.chosen.n == len(QUESTIONS) // 2
    assert [p.rows for p in found.tuning] == sorted(p.rows for p in found.tuning)
    assert all(a.rows > b.rows for a, b in zip(found.check, found.check[1:], strict=False))
    assert advise(found) == []


def test_what_met_it_by_luck_is_not_chosen(answers: Any) -> None:
    """Questions that the search sees are easy, the others are not."""
    answers(lambda setting, question, random: (
        usual(setting, question, random)[0], 0.01 if question.line % 2 or isinstance(setting.policy, Full) else 0.5))
    found = found_for(Target(max_kl=0.1))
    assert found.chosen is None
    assert len(found.check) == 1
    assert "on the 20 others not for sure (KL 0.500 (0.50…0.50), top-1 agreement 0%, F1 0.750)" in advise(found)[0]


def test_where_nothing_meets_it_the_nearest_is_named(answers: Any) -> None:
    answers(lambda setting, question, random: usual(setting, question, random, scale=5.0))
    found = found_for(Target(max_kl=0.1))
    assert (found.chosen, found.check) == (None, [])
    first, *_, last = advise(found)
    assert first.startswith("The nearest was query 0.")
    assert "exact" in last


def test_the_nearest_is_the_one_that_agrees_most_where_agreement_is_asked_for(answers: Any) -> None:
    def agreement(setting: Setting, question: Question, random: np.random.Generator) -> tuple[float, float]:
        share = question.line % 10
        if isinstance(setting.policy, NoRecompute):
            return 0.1, 0.19 if share < 8 else 0.21  # agree below .2
        return (1.0, 0.0) if isinstance(setting.policy, Full) else (0.2, 0.0 if share < 5 else 0.21)

    answers(agreement)
    first, *_ = advise(found_for(Target(min_top1=0.85)))
    assert first.startswith("The nearest was none: KL 0.19"), "others have less KL and agree less"


def test_a_target_below_rounding_is_said_to_be_one(answers: Any) -> None:
    answers(lambda setting, question, random: (0.5, 0.02))
    [advice] = advise(found_for(Target(max_kl=0.01)))
    assert "Even with everything recomputed there is KL 0.020" in advice


def test_what_recomputes_nearly_everything_is_not_worth_it(answers: Any) -> None:
    answers(lambda setting, question, random: (0.9, 0.001))
    assert found_for(Target(max_kl=0.1)).chosen is None


@pytest.mark.parametrize(("target", "met"), [
    (Target(max_kl=0.11), True), (Target(max_kl=0.09), False), (Target(min_top1=0.85), True),
    (Target(min_f1=0.95), True), (Target(min_f1=0.96), False), (Target(max_kl=0.11, min_f1=0.96), False)])
def test_every_limit_of_a_target_has_to_be_kept(target: Target, met: bool) -> None:
    blended, full = [Answered(0.2, 0.1, True, 0.95)] * 20, [Answered(1.0, 0.0, True, 1.0)] * 20
    assert (target.met_by(blended, full), target.proven_by(blended, full)) == (met, met)


def test_few_or_scattered_answers_prove_little() -> None:
    scattered = [Answered(0.2, kl, kl < 0.2) for kl in (0.0, 0.0, 0.0, 0.0, 0.4)]
    full = [Answered(1.0, 0.0, True)] * 5
    for target in (Target(max_kl=0.1), Target(min_top1=0.5)):
        assert target.met_by(scattered, full)
        assert not target.proven_by(scattered, full)


@pytest.mark.parametrize(("limits", "said"), [
    ({}, "the target has no limit"), ({"max_kl": 0.0}, "max_kl is 0"), ({"max_kl": float("nan")}, "max_kl is nan"),
    ({"max_kl": float("inf")}, "max_kl is inf"), ({"min_top1": 1.0}, "no number of questions"),
    ({"min_top1": 1.5}, "min_top1 is 1.5"), ({"min_f1": 0.0}, "min_f1 is 0")])
def test_targets_that_make_no_sense_are_refused(limits: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Target(**limits)


def test_what_a_target_is_called() -> None:
    assert str(Target(max_kl=0.1, min_f1=0.99)) == "KL <= 0.1 and F1 >= 99% of plain's"
    assert Target(max_kl=0.1).to_dict() == {"max_kl": 0.1}


def test_the_frontier_is_what_nothing_beats() -> None:
    def at(rows: float, kl: float) -> Point:
        return point(Setting(f"{rows} {kl}", NoRecompute()), [Answered(rows, kl, True)] * 2, True)

    points = [at(0.5, 0.1), at(0.1, 0.4), at(0.2, 0.4), at(0.3, 0.2), at(0.4, 0.3), at(0.3, 0.25)]
    assert [(p.rows, p.kl) for p in frontier(points)] == [(0.1, 0.4), (0.3, 0.2), (0.5, 0.1)]


def test_questions_that_cannot_be_asked_are_left_out(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(lambda setting, question, random: usual(setting, question, random))
    ask = search.Answers.ask

    def refuse(self: Any, question: Question, settings: Sequence[Setting]) -> None:
        if question.line in (3, 7):
            raise BlendError("it is too long: shorten it")
        ask(self, question, settings)

    monkeypatch.setattr(search.Answers, "ask", refuse)
    found = found_for(Target(max_kl=0.2))
    assert [failure.question.line for failure in found.failures] == [3, 7]
    assert len(found.questions) == 38
    with pytest.raises(DatasetError, match=r"9 of 11 questions can be asked \(line 3: it is too long.*10 are needed"):
        found_for(Target(max_kl=0.2), QUESTIONS[:11])


def test_an_engine_that_died_ends_it(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(usual)

    def die(*_: Any) -> None:
        raise EngineClosedError("the engine was closed")

    monkeypatch.setattr(search.Answers, "ask", die)
    with pytest.raises(EngineClosedError):
        found_for(Target(max_kl=0.2))


def test_a_target_for_f1_needs_answers(answers: Any) -> None:
    answers(lambda setting, question, random: usual(setting, question, random))
    bare = [*QUESTIONS, Question("And without?", ("text",), line=41)]
    with pytest.raises(DatasetError, match=r"line 41 has no answers.*give max_kl instead"):
        found_for(Target(min_f1=0.9), bare)
    found = found_for(Target(min_f1=0.9))
    assert found.chosen is not None
    assert (found.chosen.f1 or 0) >= 0.9


def test_a_share_of_an_f1_of_nothing_is_no_target(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a full prefill is never right, every policy is as good."""
    answers(usual)
    of = search.Answers.of
    monkeypatch.setattr(search.Answers, "of", lambda self, setting, questions: [
        replace(answered, f1=0.0) for answered in of(self, setting, questions)])
    with pytest.raises(DatasetError, match=r"F1 0 on 20 questions.*give max_kl instead"):
        found_for(Target(min_f1=0.99))
    assert found_for(Target(max_kl=0.2)).chosen is not None


def test_a_question_that_comes_again_proves_nothing_more(answers: Any) -> None:
    """A log has the same question many times: it would be in both halves, and count twice in each."""
    answers(usual)
    again = [replace(question, line=100 + question.line, answers=(), chunks=question.chunks[::-1])
             for question in QUESTIONS]
    found = found_for(Target(max_kl=0.2), [q for both in zip(QUESTIONS, again, strict=True) for q in both])
    assert (found.questions, found.repeats) == (QUESTIONS, 40)
    assert found.check[0].n == 20
    with pytest.raises(DatasetError, match=r"1 of 12 questions can be asked \(the others came before\), and 10"):
        found_for(Target(max_kl=0.2), QUESTIONS[:1] * 12)


def test_a_share_that_so_few_questions_cannot_prove_is_refused(answers: Any) -> None:
    answers(usual)
    with pytest.raises(DatasetError, match=r"40 of 40.*0.95 takes 118 to prove, even if all agree"):
        found_for(Target(min_top1=0.95))


def test_the_dearest_and_the_cheapest_are_among_those_that_are_proved() -> None:
    path = [Setting(str(number), NoRecompute()) for number in range(12)]
    for length in range(1, 13):
        thinned = search._thinned(path[:length])
        assert (thinned[0], thinned[-1]) == (path[0], path[length - 1])
        assert len({setting.name for setting in thinned}) == len(thinned) == min(length, 6)


def test_settings_have_names_of_their_own() -> None:
    labels = [family.setting(ratio).label for family in FAMILIES for ratio in RATIOS]
    labels += [setting.label for setting in CHEAPEST]
    assert len(set(labels)) == len(labels)


def test_the_report_shows_the_curve_and_the_choice(answers: Any) -> None:
    for scale, said in ((0.05, "chosen: query 0."), (5.0, "No setting is good enough")):
        answers(lambda setting, question, random, scale=scale: usual(setting, question, random, scale))
        found = found_for(Target(max_kl=0.2))
        console = Console(record=True, width=80)
        show(console, found, advise(found))
        text = console.export_text()
        assert said in text
        assert text.count("█") > 100
        assert max(map(len, text.splitlines()[:30])) <= 80


def test_a_heading_that_several_chunks_have_is_no_subject() -> None:
    one, two, three = chunks = [DocumentChunk(text, "a.md", heading, 9) for text, heading in (
        ("The lamp.", "Light"), ("The lamp was lit in 1847 by hand and burned oil.", "Light"), ("Goats.", "Milk"))]
    assert [_subject(chunk, chunks) for chunk in (one, two, three)] == [
        "The lamp.", "The lamp was lit in 1847 by hand", "Milk"]


@pytest.mark.parametrize(("said", "question"), [
    ("Who built the lighthouse?\nAlan Marsh.", "Who built the lighthouse?"),
    ("Sure! Here it is:\n\nWhat burned in the lamp? It was oil.", "What burned in the lamp?"),
    ("好的：\n谁在1847年建造了灯塔\uff1f", "谁在1847年建造了灯塔\uff1f"), ("为什么\uff1f", ""),
    ("من بنى المنارة القديمة\u061f نعم", "من بنى المنارة القديمة\u061f"),
    ("The lighthouse was built in 1847.", ""), ("Why?", ""), ("", "")])
def test_a_question_is_found_in_what_a_model_says(said: str, question: str) -> None:
    assert _question(said) == question
