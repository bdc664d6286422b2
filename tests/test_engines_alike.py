"""The two engines offer the same, by the same names and with the same arguments."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from blendrag import AsyncBlendEngine, BlendEngine
from blendrag.requests import RequestOptions

ONLY_EMBEDDED = {"stream", "store", "tokenizer"}
"""`generate` of the other one streams; its store is in another process; and its tokenizer comes with `tokens()`."""
ONLY_ASYNC = {"complete"}
"""What the embedded one calls `generate`: all answers at once."""


def public(engine: type) -> set[str]:
    return {name for name in vars(engine) if not name.startswith("_")}


def test_neither_lacks_what_the_other_has() -> None:
    assert public(BlendEngine) - public(AsyncBlendEngine) == ONLY_EMBEDDED
    assert public(AsyncBlendEngine) - public(BlendEngine) == ONLY_ASYNC


@pytest.mark.parametrize("name", ["encode", "forget", "stored", "flush", "reset_prefix_cache", "quality", "close"])
def test_methods_take_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(engine, name)).parameters for engine in (BlendEngine, AsyncBlendEngine))
    assert [str(parameter) for parameter in ours.values()] == [str(parameter) for parameter in theirs.values()]


@pytest.mark.parametrize(("engine", "name"), [(BlendEngine, "generate"), (BlendEngine, "stream"),
                                              (AsyncBlendEngine, "generate"), (AsyncBlendEngine, "complete")])
def test_every_way_to_ask_takes_all_options(engine: type, name: str) -> None:
    options = {field.name: field.default for field in fields(RequestOptions) if field.name != "policy_settings"}
    keywords = {parameter.name: parameter.default for parameter in inspect.signature(
        getattr(engine, name)).parameters.values() if parameter.kind is parameter.KEYWORD_ONLY}
    keywords.pop("request_id", None)  # of a request that somebody else has named
    assert keywords == options
