"""The prompts of a load: texts of the lengths that were asked for, the same ones for every arm."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from blendrag.bench.load.measure import load_tokens
from blendrag.bench.load.prompts import Lengths, Prompts
from blendrag.bench.load.turns import Conversations, Style
from blendrag.bench.load.workload import Request
from blendrag.bench.texts import Vocabulary
from blendrag.errors import BlendError, ConfigError, DatasetError

LENGTHS = Lengths(document=40, system=20, question=10, answer=8)


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(load_tokens(str(smollm2)))


@pytest.fixture
def prompts(vocabulary: Vocabulary) -> Prompts:
    return Prompts(vocabulary, LENGTHS, pool=8)


def test_texts_have_their_length_and_depend_on_name_and_seed_alone(vocabulary: Vocabulary) -> None:
    text = vocabulary.text("one", 40)
    assert 36 <= len(vocabulary.tokens.chunk_ids(text)) <= 40
    assert vocabulary.text("two", 40) != text == vocabulary.text("one", 40)
    assert Vocabulary(vocabulary.tokens, seed=1).text("one", 40) != text


def test_requests_of_one_conversation_hold_its_history_without_its_documents(prompts: Prompts) -> None:
    requests = [Request(0, 0, (3, 1), 0), Request(1, 0, (2,), 1), Request(2, 0, (1,), 0, turn=1)]
    first, other, second = prompts.requests(requests)
    assert first.chunks == [prompts.document(3), prompts.document(1)]
    assert second.chunks == [prompts.document(1)]
    turn = prompts.turn(0, 0, (3, 1))
    assert second.text.startswith(f"{prompts.prefix}{turn.question}\n\n{turn.answer}\n\n{prompts.document(1)}")
    assert turn.question in first.text
    assert turn.question not in other.text
    assert first.prefix == other.prefix == prompts.prefix


def test_only_documents_beyond_the_pool_are_new_in_each_series(vocabulary: Vocabulary, prompts: Prompts) -> None:
    later = Prompts(vocabulary, LENGTHS, pool=8, series=1)
    assert [later.document(number) == prompts.document(number) for number in (0, 7, 8)] == [True, True, False]


def test_real_documents_are_used_as_they_are_and_must_suffice(vocabulary: Vocabulary) -> None:
    prompts = Prompts(vocabulary, LENGTHS, pool=2, real=["First.", "Second."])
    assert prompts.requests([Request(0, 0, (1, 0), 0)])[0].chunks == ["Second.", "First."]
    with pytest.raises(DatasetError, match="more than the 2 documents"):
        prompts.document(2)


@pytest.mark.parametrize(("style", "chunks", "grows"), [
    (Style.SAME, [2, 2, 2], True), (Style.REPLACED, [2, 2, 2], False), (Style.ACCUMULATED, [2, 4, 6], True)])
def test_what_becomes_of_the_documents_of_a_conversation(prompts: Prompts, style: Style, chunks: list[int],
                                                        grows: bool) -> None:
    conversations = Conversations(turns=3, per_turn=2, pool=8)
    turns = conversations.prompts(style, 0, prompts)
    assert [len(turn.chunks) for turn in turns] == chunks
    assert turns == conversations.prompts(style, 0, prompts)
    assert turns != conversations.prompts(style, 1, prompts)
    for before, after in pairwise(turns):
        assert after.text.startswith(before.text) is grows
        assert (before.chunks == after.chunks[:2]) is grows or style is Style.ACCUMULATED


def test_a_pool_without_enough_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 turns of 3 documents need more than the 11"):
        Conversations(turns=4, per_turn=3, pool=11)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BlendError, match=r"the tokenizer of .* cannot be loaded"):
        load_tokens(str(tmp_path))
