"""Chunks of requests are encoded over several steps, and written by a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendrag.runtime.messages import Missing
from blendrag.runtime.passes.entry_writer import EntryWriter
from blendrag.runtime.passes.populating import Populating


class Encoder:
    """Computes nothing; writes wait until they are let through.

    Attributes:
        rows: of each forward.
        written: names of entries, with the fingerprint that the store had when they were.
    """

    def __init__(self) -> None:
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.forward: Any = SimpleNamespace(max_rows=100, timed_tile=self._run)
        self.entries: Any = SimpleNamespace(key=lambda scope, variant, ids: str(len(ids)), put_shares=self._put,
                                            share=lambda scope, key, *_: key, present=lambda keys: set())
        self.writer = EntryWriter(self.entries)
        self.fingerprint = "first"
        self.let_through = threading.Event()
        self.rows: list[int] = []
        self.written: list[tuple[str, str]] = []

    def prefix(self, scope: str, ids: list[int]) -> None:
        return None

    def lane(self, prefix: Any, ids: list[int]) -> Any:
        return SimpleNamespace(leave=lambda: SimpleNamespace(nbytes=1, entry=lambda: "KV"))

    def _run(self, tile: Any) -> float:
        self.rows += [part.rows.stop - part.rows.start for _, part in tile]
        return 0.0

    def _put(self, keys: list[str]) -> None:
        assert self.let_through.wait(10)
        self.written += [(key, self.fingerprint) for key in keys]


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def populating(encoder: Any) -> Iterator[Populating]:
    made = Populating(encoder)
    yield made
    encoder.let_through.set()
    made.close()


def missing(*lengths: int) -> list[Missing]:
    return [Missing(list(range(length)), False, "default") for length in lengths]


def test_a_step_computes_what_it_may(encoder: Encoder, populating: Populating) -> None:
    assert populating.advance(missing(150), [], 60).rows == 60
    assert populating.advance([], [], 60).rows == 60
    assert populating.advance([], [], 60).rows == 30
    assert encoder.rows == [60, 60, 30]


def test_many_short_chunks_count_for_more_than_their_rows(encoder: Encoder, populating: Populating) -> None:
    """Each costs a share of its own in every layer of the forward."""
    assert populating.advance(missing(*[16] * 20), [], 64).rows <= 32


def test_a_chunk_is_done_when_it_is_written(encoder: Encoder, populating: Populating) -> None:
    assert populating.advance(missing(10), [], 100).done == 0
    encoder.let_through.set()
    done = 0
    while not done:
        done = populating.advance([], [], 100).done
    assert (done, encoder.written) == (1, [("10", "first")])


def test_before_a_change_of_weights_what_is_computed_is_written_and_the_rest_dropped(
        encoder: Encoder, populating: Populating) -> None:
    """The KV of earlier weights must not be named after the later ones."""
    populating.advance(missing(20, 150), [], 70)
    computed = list(encoder.rows)
    timer = threading.Timer(0.05, encoder.let_through.set)
    timer.start()
    populating.abandon()
    encoder.fingerprint = "second"
    assert encoder.written == [("20", "first")]
    assert populating.advance([], [], 1000).done == 2
    assert (encoder.rows, encoder.written) == (computed, [("20", "first")])


def test_a_failure_ends_what_waits_and_the_next_chunks_are_encoded(encoder: Encoder, populating: Populating) -> None:
    encoder.let_through.set()
    encoder.forward.timed_tile = lambda tile: 1 / 0
    assert populating.advance(missing(20, 30), [], 100).done == 2
    encoder.forward.timed_tile = encoder._run
    assert populating.advance(missing(40), [], 100).rows == 40
