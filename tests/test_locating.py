"""Documents of which only the text is known, found in the tokens of prompts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from blendrag.errors import PromptError
from blendrag.runtime.planning.locating import DocumentTokens, locate
from blendrag.tokens import SegmentTokenizer
from tests.engine.texts import PASSAGES


@pytest.fixture(scope="module")
def tokens(smollm2):
    return SegmentTokenizer(AutoTokenizer.from_pretrained(smollm2))


def array(ids):
    return np.array(ids, np.int64)


def places(prompt, *documents, taken=()):
    found, lost = locate(array(prompt), map(array, documents), taken)
    return [(place.start, place.end, place.offset) for place in found], lost


def test_whole_documents():
    one, two = list(range(100, 120)), list(range(200, 230))
    assert places([1, 2, *two, 3, *one], one, two) == ([(2, 32, 0), (33, 53, 0)], [])
    assert places([1, *one, 3], one, two) == ([(1, 21, 0)], [30])
    assert places(one, one) == ([(0, 20, 0)], [])
    assert places([], one) == ([], [20])
    assert places([1, 2], []) == ([], [0])


def test_tokens_at_the_edges_may_have_merged_with_others():
    one = list(range(100, 140))
    assert places([1, 2, *one[2:-3], 7], one) == ([(2, 37, 2)], [])
    assert places([*one[8:-8]], one) == ([(0, 24, 8)], [])
    assert places([1, *one[9:]], one) == ([], [40])
    assert places(one[1:], [5, 6]) == ([], [2])


def test_each_document_stands_in_a_place_of_its_own():
    one = list(range(100, 120))
    inside = one[4:14]
    twice = [*one, 1, *one]
    assert places(twice, one) == ([(0, 20, 0)], [])
    assert places(twice, one, one) == ([(0, 20, 0), (21, 41, 0)], [])
    assert places(twice, one, one, one) == ([(0, 20, 0), (21, 41, 0)], [20])
    assert places([*one, 1, *inside], inside, one) == ([(0, 20, 0), (21, 31, 0)], [])
    assert places(twice, one, taken=[(5, 6)]) == ([(21, 41, 0)], [])


def test_bytes_that_lie_across_tokens_are_no_place():
    shifted = np.frombuffer(b"\x00" + array([5, 6, 7]).astype(np.int32).tobytes() + b"\x00\x00\x00", np.int32)
    assert places([*shifted, 5, 6, 7], [5, 6, 7]) == ([(4, 7, 0)], [])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_texts_are_found_wherever_they_stand_in_a_text(tokens, data):
    document = data.draw(st.sampled_from(PASSAGES))
    edges = st.text(st.sampled_from("aT1. \n(\"é"), max_size=5)
    before, after = data.draw(edges), data.draw(edges)
    ids = tokens.text_ids(f"Read this.{before}{document}{after}And say something.")
    [found], _ = locate(array(ids), DocumentTokens(tokens)([document], array(ids)))
    inside = tokens.tokenizer.decode(ids[found.start : found.end])
    assert inside.strip() in document
    assert len(inside) > len(document) - 40
    assert list(found.ids[found.offset :][: found.end - found.start]) == ids[found.start : found.end]


def test_tokens_of_documents_are_those_that_an_engine_stores(tokens):
    [found] = DocumentTokens(tokens)([PASSAGES[0]], array(tokens.chunk_ids(PASSAGES[0])))
    assert list(found) == tokens.chunk_ids(PASSAGES[0])
    document = f"{PASSAGES[0]} <|im_end|> {PASSAGES[1]}"
    prompt = array(tokens.text_ids(f"Read. {document} Answer."))
    [place], _ = locate(prompt, DocumentTokens(tokens)([document], prompt))
    assert place.end - place.start > len(found) + 20
    assert [list(found) for found in DocumentTokens(None)([PASSAGES[0]], array([1]))] == [[]]


@pytest.mark.parametrize(("texts", "error"), [
    ("text", TypeError), (7, TypeError), ({"a": 1}, TypeError), (["fine", 7], TypeError), (["\ud800"], PromptError),
], ids=ascii)
def test_what_is_no_list_of_texts(tokens, texts, error):
    with pytest.raises(error):
        list(DocumentTokens(tokens)(texts, array([1] * 100)))


def test_texts_that_are_too_long_for_the_prompt_are_not_tokenised(tokens, monkeypatch):
    ids = array(tokens.text_ids(PASSAGES[0]))
    tokenised = []
    monkeypatch.setattr(tokens, "text_array", lambda text: tokenised.append(text) or array([]))
    texts = ["word " * 100_000, PASSAGES[0], *(f"{number} {PASSAGES[1]}" for number in range(1000))]
    found = list(DocumentTokens(tokens)(texts, ids))
    assert len(found) == 1002
    assert PASSAGES[0] in tokenised
    assert sum(map(len, tokenised)) < 30_000


def test_documents_of_equal_tokens_are_found_one_behind_the_other():
    prompt = [7] * 2_000
    found, lost = places(prompt, *[[7] * 30] * 60)
    assert [start for start, _, _ in found] == list(range(0, 60 * 23, 23)), "interiors with one edge"
    assert lost == []


def test_what_is_no_token_id_is_in_no_prompt():
    assert places([1, 2, 3, -1, 2**40], [-1], [2**40], [2**32 - 1], [2, 3]) == ([(1, 3, 0)], [1, 1, 1])
