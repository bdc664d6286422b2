"""Many sequences are found in one text at once, as `str.find` finds each of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag import anchors, occurrences
from blendrag.occurrences import code_points, find_occurrences

_TEXTS = st.text("ab\U0001f600", max_size=60)


def _find(haystack: str, needles: list[str]) -> list[int]:
    return find_occurrences(code_points(haystack), [code_points(needle) for needle in needles])


@settings(max_examples=300, deadline=None)
@given(_TEXTS, st.lists(_TEXTS, max_size=12), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12))
def test_each_needle_is_where_str_find_finds_it(haystack: str, others: list[str], cuts: list[tuple[int, int]]) -> None:
    needles = others + [haystack[start:end] for start, end in cuts]
    assert _find(haystack, needles) == [haystack.find(needle) for needle in needles]


@settings(max_examples=100, deadline=None)
@given(st.text("ab", min_size=20, max_size=120), st.lists(st.text("ab", min_size=1, max_size=5), max_size=8))
def test_a_long_text_is_searched_in_blocks_that_overlap(haystack: str, needles: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(occurrences, "_BLOCK", 8)
        assert _find(haystack, needles) == [haystack.find(needle) for needle in needles]


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=400) | st.text(max_size=200), st.data())
def test_long_needles_are_found_by_their_middles_or_else_as_short_ones_are(haystack: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=12))
    needles = [f"{haystack[start:end]}{data.draw(st.sampled_from(['', '', 'a', 'x' * 20]))}" for start, end in cuts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchors, "_BLOCK", data.draw(st.sampled_from([7, 16, 1 << 20])))
        patch.setattr(anchors, "_WORK_PER_ELEMENT", data.draw(st.sampled_from([0, 1, 4, 1000])))
        assert _find(haystack, needles) == [haystack.find(needle) for needle in needles]


def test_an_empty_needle_is_at_the_start_and_a_longer_one_nowhere() -> None:
    assert _find("ab", ["", "abc", "b"]) == [0, -1, 1]
    assert _find("", ["", "a"]) == [0, -1]
    assert _find("ab", []) == []


def test_half_a_surrogate_pair_is_a_character() -> None:
    assert _find("a\ud800b", ["\ud800b", "\udfff"]) == [1, -1]


def test_needles_that_begin_alike_are_told_apart_in_equal_characters() -> None:
    needles = ["a" * length for length in range(1, 200)] + ["a" * length + "b" for length in range(199)]
    assert _find("a" * 150 + "b", needles) == [("a" * 150 + "b").find(needle) for needle in needles]
