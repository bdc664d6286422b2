"""What requests say about their chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams

from blendrag.blend_params import BlendParams
from blendrag.config import DELIMITER
from blendrag.runtime.planning.marks import delimited, delimiter_in, parse_blend_params
from blendrag.tokens import SegmentTokenizer
from tests.helpers import make_request

D = [7, 8]


@pytest.mark.parametrize(("ids", "spans"), [
    ([], []),
    ([1, 2, 3], []),
    ([1, 7, 8, 2], []),
    ([1, 7, 8, 2, 3, 7, 8, 4], [(3, 5)]),
    ([7, 8, 1, 7, 8, 2, 7, 8], [(2, 3), (5, 6)]),
    ([7, 8, 7, 8, 1, 7, 8], [(4, 5)]),
    ([7, 7, 8, 1, 8, 7, 2, 7, 8], [(3, 7)]),
    ([1, 7], []),
])
def test_what_lies_between_two_delimiters_is_a_chunk(ids, spans):
    assert delimited(ids, D) == spans


@pytest.mark.parametrize(("ids", "spans"), [
    ([7, 7, 7], []),
    ([7, 7, 7, 7], []),
    ([1, 7, 7, 7, 2, 7, 7], [(3, 5)]),
    ([7, 7, 1, 7, 2, 7, 7], [(2, 5)]),
])
def test_delimiters_that_could_overlap_are_read_from_the_left(ids, spans):
    assert delimited(ids, [7, 7]) == spans


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=6))
def test_delimited_pieces_come_back(pieces):
    ids = [token for piece in pieces for token in (*piece, *D)][: -len(D)]
    assert [ids[start:end] for start, end in delimited(ids, D)] == [piece for piece in pieces[1:-1] if piece]


def request(ids, marks=None):
    transfer = {} if marks is None else {"extra_args": {"kv_transfer_params": {"blend": marks}}}
    return make_request(ids, sampling_params=SamplingParams(max_tokens=4, **transfer))


def test_spans_and_documents_go_before_delimiters():
    ids = [1, 7, 8, 2, 3, 7, 8, 4]
    assert parse_blend_params(request(ids), D) == BlendParams(spans=[[3, 5]])
    assert parse_blend_params(request(ids, {"spans": [[0, 2]]}), D) == BlendParams(spans=[[0, 2]])
    assert parse_blend_params(request(ids, {"policy": {"ratio": 0.3}}), D) == BlendParams(
        spans=[[3, 5]], policy={"ratio": 0.3})
    for named in ({"documents": ["a"]}, {"document_ids": [[2, 3]]}, {"documents": ["a"], "spans": [[0, 2]]}):
        assert parse_blend_params(request(ids, named), D) == BlendParams(**named)
    assert parse_blend_params(request(ids, False), D) is None
    assert parse_blend_params(request(ids), []) == BlendParams()


@pytest.mark.parametrize("params", ["params", [], 7, {"spans": "all"}, {"documents": [7]}, {"spam": 1}], ids=str)
def test_what_makes_no_sense_is_logged_and_prefilled_in_full(params, caplog):
    assert parse_blend_params(request([1, 2, 3], params), D) is None
    assert "is prefilled in full: kv_transfer_params.blend" in caplog.text


def test_transfer_parameters_that_are_no_object_are_prefilled_in_full():
    params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": "text"})
    assert parse_blend_params(make_request([1, 2, 3], sampling_params=params), D) is None


def test_a_delimiter_whose_tokens_depend_on_its_neighbours_is_refused_aloud(smollm2, caplog):
    tokens = SegmentTokenizer(AutoTokenizer.from_pretrained(smollm2))
    assert delimiter_in(tokens, DELIMITER) == tokens.text_ids(DELIMITER)
    assert caplog.text == ""
    assert delimiter_in(tokens, " # # ") == []
    assert "use the default delimiter, or spans" in caplog.text
