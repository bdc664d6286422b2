"""Conversations of a data set: which question follows which, and prompts that go on where the last one ended."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blendrag import Chunk
from blendrag.adapters import chat_prompt
from blendrag.errors import BlendError, DatasetError
from blendrag.evaluate import FollowUp, Question, conversations_of, load_questions, shuffled
from blendrag.evaluate.prompts import INSTRUCTION, build_prompt, follow_up_prompt, with_answer
from blendrag.tokens import SegmentTokenizer

DATA = Path(__file__).parent.parent / "examples/data"
ASKED = [FollowUp("And when?", ("1847",)), FollowUp("Why?", instruction="Be brief.")]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> SegmentTokenizer:
    return SegmentTokenizer(tokenizer)


def question(number: int, *answers: str, chunks: str = "") -> Question:
    return Question(f"Question {number}?", tuple(chunks or f"{number}"), answers, line=number)


def test_a_conversation_of_the_data_set_is_cut() -> None:
    entry = Question("Where?", ("x",), ("Linn",), None, 3, tuple(ASKED))
    assert conversations_of([entry], 3) == [entry]
    assert conversations_of([entry], 2)[0].follow_ups == (ASKED[0],)
    with pytest.raises(DatasetError, match=r"line 3 has 2 follow_ups, 4 turns take 3: ask for fewer turns"):
        conversations_of([entry], 4)
    with pytest.raises(DatasetError, match="line 1 has 0 follow_ups, 2 turns take 1"):
        conversations_of([entry, question(1)], 2)


def test_questions_follow_each_other_about_the_documents_of_all() -> None:
    questions = [question(1, "Ann", chunks="abc"), question(2, "the Eller", "Eller", chunks="xbyz"),
                 question(3, "ann.", chunks="p"), question(4, chunks="q")]
    first, second, third, fourth = conversations_of(questions, 2)
    assert first.follow_ups == (FollowUp("Question 2?", ("the Eller", "Eller")),)
    assert first.chunks == tuple("axbcyz"), "rank by rank, each once"
    assert (first.text, first.answers, first.line) == ("Question 1?", ("Ann",), 1)
    assert [one.follow_ups[0].text for one in (second, third, fourth)] == ["Question 3?", "Question 4?", "Question 1?"]
    assert [one.text for one in conversations_of(questions, 3)[0].follow_ups] == ["Question 2?", "Question 4?"], (
        "the third has the answer of the first")
    with pytest.raises(DatasetError, match="line 1: the set has no 4 questions with answers of their own"):
        conversations_of(questions, 4)
    with pytest.raises(DatasetError, match="line 1: the set has no 2 questions"):
        conversations_of([question(1), question(1)], 2)


@pytest.mark.parametrize("name", ["multihop", "lookup", "summaries"])
def test_sets_of_single_questions_make_conversations(name: str) -> None:
    questions = load_questions(DATA / f"{name}.json")
    made = conversations_of(questions, 2)
    for one in made:
        [follow_up] = one.follow_ups
        [asked] = [other for other in questions if other.text == follow_up.text]
        [begun] = [other for other in questions if other.text == one.text]
        assert set(one.chunks) == {*begun.chunks, *asked.chunks}
        assert set(follow_up.answers).isdisjoint(one.answers)
    assert shuffled(made, 1)[0].follow_ups == made[0].follow_ups


@pytest.mark.parametrize("answer", ["Tarn Bridge", " 1847.\n", "\n\n- one\n- two", "", "“Ann”", "<p>", "é日本"])
@pytest.mark.parametrize("template", [True, False])
def test_the_tokens_of_a_turn_begin_the_next(tokenizer: Any, tokens: SegmentTokenizer, answer: str, template: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    if not template:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    prompts = [build_prompt(tokenizer, Question("Where?", ("The Eller rises on Grey Moor.\n\n", "Salmon.\n\n")))]
    for follow_up in ASKED:
        prompts.append(follow_up_prompt(tokenizer, prompts[-1], answer, follow_up))
    ids = [tokens(prompt).ids for prompt in prompts]
    for before, after in pairwise(ids):
        assert len(before) < len(after)
        assert after[: len(before)] == before
    assert prompts[-1].chunks == prompts[0].chunks
    assert [tokens(prompt).spans for prompt in prompts] == [tokens(prompts[0]).spans] * 3


def test_a_follow_up_is_what_the_template_makes_of_the_conversation(tokenizer: Any) -> None:
    first = build_prompt(tokenizer, Question("Where?", ("The Eller rises on Grey Moor.\n\n",)))
    second = follow_up_prompt(tokenizer, first, " Grey Moor\n", ASKED[0])
    asked = first.text[first.text.index("Read these"): first.text.index("Where?") + len("Where?")]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Grey Moor"},
                {"role": "user", "content": f"{INSTRUCTION}\nQuestion: And when?"}]
    assert second.text == chat_prompt(tokenizer, messages).text
    assert second.text.startswith(with_answer(tokenizer, first, "Grey Moor").text)
    assert "Be brief.\nQuestion: Why?" in follow_up_prompt(tokenizer, second, "1847", ASKED[1]).text


def test_without_a_template_answers_stand_behind_the_lead(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    first = build_prompt(tokenizer, Question("Where?", ("x",)))
    assert first.parts[1] == Chunk("x")
    text = follow_up_prompt(tokenizer, first, "Here", ASKED[1]).text
    assert text.endswith("Question: Where?\nAnswer: Here\n\nBe brief.\nQuestion: Why?\nAnswer:")


def test_a_template_without_conversations_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_prompt(tokenizer, Question("Where?", ("x",)))
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(BlendError, match="shows no answer with a question behind it"):
        follow_up_prompt(tokenizer, first, "Here", ASKED[0])
