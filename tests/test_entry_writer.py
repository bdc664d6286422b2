"""Entries are stored by a thread, in order, those that wait together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from blendrag.errors import StoreError
from blendrag.runtime.passes import entry_writer
from blendrag.runtime.passes.entry_writer import EntryWriter
from blendrag.runtime.passes.host_copy import HostCopy


class Entries:
    """Writes when it is let through; `broken` keys cannot be written."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.writing, self.let_through = threading.Event(), threading.Event()
        self.broken = ""

    def share(self, scope: str, key: str, entry: Any, *_: Any) -> str:
        assert entry.tokens == 3
        return key

    def put_shares(self, keys: list[str]) -> None:
        self.writing.set()
        assert self.let_through.wait(10)
        self.groups.append("".join(keys))
        if set(keys) & set(self.broken):
            raise StoreError("the disk is full")


@pytest.fixture
def entries() -> Entries:
    return Entries()


def copy() -> HostCopy:
    return HostCopy([torch.ones(3, 1, 2)] * 2, [torch.zeros(3, 1, 2)] * 2)


def test_what_comes_while_some_are_written_is_stored_together(entries: Any) -> None:
    writer = EntryWriter(entries)
    first = writer.add("scope", "a", copy())
    assert entries.writing.wait(10)
    later = [writer.add("scope", key, copy()) for key in "bcd"]
    assert not first.done()
    entries.let_through.set()
    writer.close()
    assert (entries.groups, [write.done() for write in (first, *later)]) == (["a", "bcd"], [True] * 4)
    assert not [thread for thread in threading.enumerate() if thread.name == "blendrag-store"]
    writer.add("scope", "e", copy()).result(10)


def test_a_failure_is_of_those_that_were_stored_together(entries: Any) -> None:
    writer, entries.broken = EntryWriter(entries), "a"
    first = writer.add("scope", "a", copy())
    assert entries.writing.wait(10)
    second = writer.add("scope", "b", copy())
    entries.let_through.set()
    with pytest.raises(StoreError, match="full"):
        first.result(10)
    second.result(10)


def test_computing_waits_where_the_disk_is_slower(entries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_writer, "_PENDING_BYTES", 2 * copy().nbytes)
    writer, behind = EntryWriter(entries), 0
    entries.let_through.set()
    for number, key in enumerate("abcdefgh"):
        writer.add("scope", key, copy())
        behind = max(behind, number + 1 - len("".join(entries.groups)))
    writer.close()
    assert behind <= 3, "the two that fill the room and one that was written a moment ago"
    assert "".join(entries.groups) == "abcdefgh"


def test_a_copy_holds_what_was_computed() -> None:
    k, v = [torch.randn(5, 2, 4, dtype=torch.bfloat16) for _ in range(3)], [torch.randn(5, 2, 4).bfloat16()] * 3
    entry = HostCopy(k, v).entry()
    assert torch.equal(entry.k, torch.stack(k))
    assert torch.equal(entry.v, torch.stack(v))
