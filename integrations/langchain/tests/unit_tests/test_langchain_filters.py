"""Metadata filters of `BlendVectorStore`."""

from __future__ import annotations

from typing import Any

import pytest
from blendrag.errors import ConfigError

from langchain_blendrag._filters import condition

METADATA = {"source": "a.md", "year": 2021, "tags": None}


@pytest.mark.parametrize(("wanted", "expected"), [
    ({}, True),
    ({"source": "a.md"}, True),
    ({"source": "b.md"}, False),
    ({"source": "a.md", "year": 2020}, False),
    ({"source": ["a.md", "b.md"]}, True),
    ({"year": {"$eq": 2021}}, True),
    ({"year": {"$ne": 2021}}, False),
    ({"year": {"$neq": 2020}}, True),
    ({"year": {"$gt": 2020, "$lte": 2021}}, True),
    ({"year": {"$gte": 2022}}, False),
    ({"year": {"$lt": 2021}}, False),
    ({"year": {"$in": [2020, 2021]}}, True),
    ({"year": {"$nin": [2020, 2021]}}, False),
    ({"$and": [{"source": "a.md"}, {"year": 2021}]}, True),
    ({"$or": [{"source": "b.md"}, {"year": 2021}]}, True),
    ({"$or": [{"source": "b.md"}, {"year": 2020}]}, False),
    ({"$not": {"source": "b.md"}}, True),
    ({"missing": {"$gt": 1}}, False),
    ({"missing": {"$ne": 1}}, True),
    ({"source": {"$gt": 1}}, False),
    (lambda metadata: metadata["year"] > 2020, True),
])
def test_what_a_filter_lets_through(wanted: Any, expected: bool) -> None:
    check = condition(wanted)
    assert check is not None
    assert check(METADATA) is expected


def test_no_filter_is_no_condition() -> None:
    assert condition(None) is None


@pytest.mark.parametrize(("wanted", "message"), [
    ({"year": {"$near": 3}}, "'\\$near' is not an operator for fields: use \\$eq"),
    ({"$gt": 3}, "'\\$gt' is not an operator for whole filters: use \\$and"),
    ("source", "a filter is a mapping or a function"),
])
def test_bad_filters_are_refused_with_the_remedy(wanted: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        condition(wanted)
