"""Blended beginnings are known by their blocks, the longest first."""

from __future__ import annotations

import pytest

from blendrag.policies import First, Policy, Query
from blendrag.runtime.planning.beginnings import Beginnings, kind_of

KIND = b"kind"


def hashes(text: str) -> list[bytes]:
    """One for each letter, which names all letters up to it."""
    return [text[: end + 1].encode() for end in range(len(text))]


def salts(beginnings: Beginnings, text: str, kind: bytes = KIND) -> list[bytes]:
    return [salt for ((_, salt),) in beginnings.find(kind, hashes(text))]


@pytest.fixture
def beginnings() -> Beginnings:
    known = Beginnings(100)
    known.add(KIND, hashes("abcde"), ((0, b"long"),))
    known.add(KIND, hashes("abx"), ((0, b"short"),))
    return known


def test_a_prompt_that_continues_another_finds_it(beginnings: Beginnings) -> None:
    assert salts(beginnings, "abcdefg")[0] == b"long"
    assert salts(beginnings, "abxyz")[0] == b"short"


def test_each_is_offered_once_and_the_longest_first(beginnings: Beginnings) -> None:
    assert salts(beginnings, "abcq") == [b"long", b"short"]


def test_another_prompt_finds_nothing(beginnings: Beginnings) -> None:
    assert salts(beginnings, "bcde") == []


def test_blocks_that_were_computed_in_another_way_are_not_found(beginnings: Beginnings) -> None:
    assert salts(beginnings, "abcde", b"other") == []


def test_exact_blocks_are_not_among_them() -> None:
    known = Beginnings(100)
    known.add(KIND, hashes("abcde")[3:], ((3, b"salt"),))
    assert salts(known, "abc") == []
    assert salts(known, "abcd") == [b"salt"]


def test_those_blended_longest_ago_are_forgotten_first() -> None:
    known = Beginnings(6)
    for text in ("abc", "def", "abc", "ghi"):
        known.add(KIND, hashes(text), ((0, text.encode()),))
    assert [salts(known, text) for text in ("abc", "def", "ghi")] == [[b"abc"], [], [b"ghi"]]


def test_a_request_looks_at_few_of_them() -> None:
    known = Beginnings(1000)
    for number in range(20):
        known.add(KIND, hashes("a" * (20 - number)), ((0, bytes([number])),))
    assert len(salts(known, "a" * 20)) == 4


def test_all_can_be_forgotten(beginnings: Beginnings) -> None:
    beginnings.clear()
    assert (len(beginnings), salts(beginnings, "abcde")) == (0, [])


@pytest.mark.parametrize("other", [Query(ratio=0.5), First(), Query(reach=1.0)])
def test_policies_and_their_settings_are_kinds_of_their_own(other: Policy) -> None:
    assert kind_of(Query(), None) == kind_of(Query(), None)
    assert len({kind_of(Query(), None), kind_of(other, None), kind_of(Query(), 64)}) == 3
