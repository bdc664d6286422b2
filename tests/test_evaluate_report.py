"""From outcomes to figures, the table, the JSON and the HTML report; what failed or was interrupted included."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from blendrag.errors import BlendError, EngineClosedError
from blendrag.evaluate import PLAIN, Evaluation, Outcome, Question, Setting, compare, evaluate, run, summarise
from blendrag.evaluate.ask import Answer
from blendrag.evaluate.blendmap import MappedPrompt, draw, pieces_of
from blendrag.evaluate.html import report
from blendrag.evaluate.metrics import Distribution
from blendrag.evaluate.plots import Axis, Point, Series, chart, spanning
from blendrag.evaluate.table import show
from blendrag.policies import CacheBlend, NoRecompute, Query
from blendrag.stats import BlendMap, BlendStats, ChunkStats

SETTINGS = [Setting("default", Query(0.2)), Setting("cacheblend", CacheBlend(0.1)), Setting("none", NoRecompute())]
QUESTIONS = [Question(f"Who is <b>{n}</b>?", ("One.\n\n",), ("Ann",) if n else (), line=n + 1) for n in range(3)]


def outcome(kl: float = 0.1, f1: float | None = 0.5, **others: Any) -> Outcome:
    usual: dict[str, Any] = {"text": "Ann & co", "rows": 0.2, "ttft_s": 0.5, "top1": True, "kl16": kl / 2,
                             "same": False, "em": f1}
    return Outcome(kl=kl, f1=f1, **(usual | others))


def evaluation() -> Evaluation:
    found = Evaluation((PLAIN, *SETTINGS), list(QUESTIONS))
    found.outcomes[PLAIN.label] = [outcome(0, f1, rows=1, ttft_s=2, same=True) for f1 in (None, 1.0, 0.5)]
    for setting in SETTINGS:
        found.outcomes[setting.label] = [outcome(kl, f1) for kl, f1 in ((0.0, None), (0.3, 0.5), (0.6, 0.5))]
    return found


def test_answers_are_compared_with_the_full_prefill() -> None:
    places = [Distribution(np.array([1, 2]), np.log(np.array(p))) for p in ([0.75, 0.25], [0.5, 0.5])]
    full = Answer("Ann", (1, 2), 1.0, 2.0), [places[0], places[1]]
    other = Answer("\nAnn Lee\nwas", (1, 3), 0.2, 0.5), [places[1], places[1]]
    found = compare(full, other, ["Ann"])
    kl = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert (found.kl, found.kl16) == (pytest.approx(kl), pytest.approx(kl / 2))
    assert (found.top1, found.same, found.f1, found.em) == (True, False, pytest.approx(2 / 3), 0)
    assert (found.rows, found.ttft_s) == (0.2, 0.5)
    itself = compare(full, full, [])
    assert (itself.kl, itself.same, itself.f1, itself.em) == (0, True, None, None)


def test_means_are_over_questions_and_differences_are_paired() -> None:
    plain, default, *_ = summarise(evaluation())
    assert (plain.policy, plain.ratio, plain.n, plain.f1, plain.kl) == ("plain", None, 3, 0.75, 0)
    assert (default.policy, default.ratio, default.rows) == ("default", 0.2, pytest.approx(0.2))
    assert (default.kl, default.kl16, default.f1) == (pytest.approx(0.3), pytest.approx(0.15), 0.5)
    assert plain.ci["f1"] == (0, 0)
    assert default.ci["f1"] == (-0.5, 0), "only -0.5 and 0 can be drawn"
    assert set(default.to_dict()) == {"policy", "ratio", "settings", "rows", "f1", "em", "kl", "top1", "kl16", "same",
                                      "ttft_s", "n", "ci"}


def test_without_right_answers_there_is_no_f1() -> None:
    found = evaluation()
    found.questions = QUESTIONS[:1]
    found.outcomes = {label: [outcome(f1=None)] for label in found.outcomes}
    assert [(s.f1, s.em, s.ci["f1"], s.kl) for s in summarise(found)] == [(None, None, None, 0.1)] * 4
    report("title", found, summarise(found))


def test_nothing_measured_is_nothing_not_nan() -> None:
    found = Evaluation((PLAIN, *SETTINGS), outcomes={setting.label: [] for setting in (PLAIN, *SETTINGS)})
    assert {(s.n, s.kl, s.rows, s.ci["kl"]) for s in summarise(found)} == {(0, None, None, None)}


class _Engine:
    policy = Query(ratio=0.2)


def test_a_question_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(engine: Any, question: Question, settings: Any, answer_tokens: int) -> dict[str, Outcome]:
        if question is QUESTIONS[1]:
            raise BlendError("the prompt is too long")
        if question is QUESTIONS[2]:
            raise ZeroDivisionError("oops")
        return {setting.label: outcome() for setting in settings}

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "_warm_up", lambda *_: None)
    seen: list[tuple[int, int]] = []
    found = evaluate(_Engine(), QUESTIONS, SETTINGS, on_progress=lambda *at: seen.append(at))  # type: ignore[arg-type]
    assert found.questions == QUESTIONS[:1]
    assert [failure.reason for failure in found.failures] == ["the prompt is too long", "ZeroDivisionError: oops"]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert {len(outcomes) for outcomes in found.outcomes.values()} == {1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineClosedError("the engine died")])
def test_what_was_measured_before_the_end_stays(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def measure(engine: Any, question: Question, settings: Any, answer_tokens: int) -> dict[str, Outcome]:
        if question is QUESTIONS[1]:
            raise error
        return {setting.label: outcome() for setting in settings}

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "_warm_up", lambda *_: None)
    found = evaluate(_Engine(), QUESTIONS, SETTINGS)  # type: ignore[arg-type]
    assert found.questions == QUESTIONS[:1]
    assert found.interrupted == isinstance(error, KeyboardInterrupt)
    assert [f"{f.question.line} {f.reason}" for f in found.failures] == (
        [] if found.interrupted else ["2 the engine died; the questions behind it were not asked"])
    console = Console(file=io.StringIO(), width=200)
    show(console, found, summarise(found), "a title")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "interrupted after 1 questions" in said if found.interrupted else "left out: line 2" in said
    assert "here query(ratio=0.2)" in said, "what default stands for"


class _Reader(HTMLParser):
    """Checks that what is opened is closed, and collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_statistics_carry_a_map_only_where_there_is_one() -> None:
    stats = mapped().stats
    assert BlendStats.from_dict(stats.to_dict()) == stats
    assert "map" not in BlendStats().to_dict()


def mapped() -> MappedPrompt:
    chunks = [ChunkStats(1, 2, reused=True), ChunkStats(3, 1, reason="not stored"), ChunkStats(-1, 9)]
    stats = BlendStats(policy="query", prompt_tokens=5, chunks=chunks, rows=0.4)
    stats.map = BlendMap([None, 0.1, 7.0, None, None], [False, True, True, False, False],
                         [True, False, True, True, True])
    return MappedPrompt("Who?", SETTINGS[0], ["<s>", "A", " <b>&", "new", "?"], stats)


def test_the_report_is_one_well_formed_file_that_escapes_text() -> None:
    found = evaluation()
    page = report("model <x> on data", found, summarise(found), mapped())
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert not re.search(r"(src|href)=|https?:(?!//www.w3.org)|<script|@import|url\(", page)
    assert "<b>" not in page
    text = "".join(reader.text)
    for wanted in ("model <x> on data", "Who is <b>1</b>?", "Ann & co", "cacheblend 0.1", " <b>&",
                   "rows computed, % of a full prefill's", "time to the first token, s",
                   "KL from plain, first token, nats"):
        assert wanted in text, wanted


def test_the_map_marks_scores_and_recomputed_tokens() -> None:
    drawn = draw(mapped())
    assert drawn.count('class="chunk"') == 2
    assert '<span class="s1">A</span>' in drawn
    assert '<span class="s4 again"> &lt;b&gt;&amp;</span>' in drawn
    assert "chunk 1 · 2 tokens · reused, 1 of its tokens computed again (50%)" in drawn
    assert "chunk 2 · 1 tokens · computed: not stored" in drawn


def test_pieces_join_to_the_text() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = "Grüße, 日本"
    pieces = pieces_of(Bytes(), list(text.encode()))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())


def test_labels_stay_on_the_chart() -> None:
    points = [Point(0.5, 0.0, "", f"label {number}") for number in range(9)]
    long = f"a policy with {', '.join('many settings' for _ in range(9))}"
    drawn = chart("many", [Series(0, points)], Axis("across", 0.0, 1.0), Axis(long, 0.0, 1.0))
    places = [float(found) for found in re.findall(r'class="label" x="[\d.]+" y="([\d.]+)"', drawn)]
    bottom = float(re.findall(r'class="grid"[^>]* y1="12" y2="(\d+)"', drawn)[0])
    assert places == [bottom + 4], "the others would be over the axis"
    assert drawn.count("textLength") == 1, "of the label that is longer than its axis"


def test_axes() -> None:
    axis = spanning("x", [0.13, 1.0], factor=100)
    assert (axis.low, axis.text(0.2)) == (0, "20")
    assert axis.high > 1
    assert [axis.text(tick) for tick in axis.ticks()] == ["0", "20", "40", "60", "80", "100"]
    log = Axis("y", 1e-3, 10, log=True)
    assert log.ticks() == pytest.approx([0.001, 0.01, 0.1, 1, 10])
    assert [log.share(value) for value in (0, 1e-3, 0.1, 10, 99)] == pytest.approx([0, 0, 0.5, 1, 1])
    flat = spanning("f1", [0.5, 0.5], zero=False)
    assert flat.low < 0.5 < flat.high
