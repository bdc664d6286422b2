"""Entries that requests need are read by threads, in order, within a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from blendrag.runtime.passes.read_ahead import ReadAhead
from blendrag.store import KVEntry
from tests.test_store_entry import make_entry

ENTRY = make_entry(0)


class Disk:
    """Entries are named by letters; those of `memory` are there at once, those of `lost` are not there at all.

    Attributes:
        begun: what was read, in order.
        let_through: reads wait for it, except those of `quick` entries.
    """

    def __init__(self) -> None:
        self.memory = ""
        self.lost = self.quick = ""
        self.begun: list[str] = []
        self.let_through = threading.Event()

    def peek(self, keys: Sequence[str]) -> dict[str, KVEntry]:
        return {key: ENTRY for key in keys if key in self.memory}

    def read(self, key: str) -> KVEntry | None:
        self.begun.append(key)
        assert key in self.quick or self.let_through.wait(10)
        if key == "!":
            raise OSError("a disk failed")
        return None if key in self.lost else make_entry(ord(key))


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def ahead(disk: Disk) -> Iterator[ReadAhead]:
    made = ReadAhead(disk.peek, disk.read, 100)
    yield made
    disk.let_through.set()
    made.clear()
    assert not [thread for thread in threading.enumerate() if thread.name == "blendrag-read"]


def ready(ahead: ReadAhead, request: str, size: int = 10) -> bool:
    """Whether a request, named by the entries that it needs, has them."""
    return ahead.ready(request, dict.fromkeys(request, size))


def wait_for(ahead: ReadAhead, *requests: str, size: int = 10) -> None:
    def here() -> list[bool]:
        return [ready(ahead, request, size) for request in requests]
    ahead.wait(lambda: all(here()), 10)
    assert all(here())


def test_what_is_in_memory_is_ready_at_once_and_stays(disk: Disk, ahead: ReadAhead) -> None:
    disk.memory = "ab"
    assert [ready(ahead, "ab"), ready(ahead, "")] == [True, True]
    disk.memory = ""
    assert ready(ahead, "ab"), "it has left the RAM tier, not the request"
    assert disk.begun == []


def test_the_rest_is_read_meanwhile(disk: Disk, ahead: ReadAhead) -> None:
    disk.memory = "b"
    assert not ready(ahead, "ab")
    assert ahead.get("a") is None
    disk.let_through.set()
    wait_for(ahead, "ab")
    read = ahead.get("a")
    assert read is not None
    assert read.result() is not None
    assert disk.begun == ["a"]


def test_a_slow_read_holds_nobody_else_up(disk: Disk, ahead: ReadAhead) -> None:
    assert not ready(ahead, "a")
    disk.quick = "b"
    wait_for(ahead, "b")
    assert not ready(ahead, "a")


def test_an_entry_that_several_need_is_read_once_and_kept_for_the_last(disk: Disk, ahead: ReadAhead) -> None:
    assert not any([ready(ahead, "ab"), ready(ahead, "bc")])
    disk.let_through.set()
    wait_for(ahead, "ab", "bc")
    assert sorted(disk.begun) == ["a", "b", "c"]
    ahead.release("ab")
    assert [ahead.get(key) is None for key in "ab"] == [True, False]
    ahead.release("bc")
    assert ahead.get("b") is None


def test_reads_wait_for_room_in_the_order_of_their_requests(disk: Disk, ahead: ReadAhead) -> None:
    disk.memory = "z"
    disk.let_through.set()
    wait_for(ahead, "abcdef")
    assert not any([ready(ahead, "ghijk"), ready(ahead, "l")]), "'l' would fit: 'ghijk' comes first"
    assert ready(ahead, "z"), "it reads nothing"
    assert sorted(disk.begun) == list("abcdef")
    ahead.release("abcdef")
    wait_for(ahead, "ghijk", "l")


def test_a_request_larger_than_all_room_is_read_alone(disk: Disk, ahead: ReadAhead) -> None:
    disk.let_through.set()
    wait_for(ahead, "abc", size=90)
    assert not ready(ahead, "d")
    ahead.release("abc")
    wait_for(ahead, "d")


def test_requests_that_share_entries_do_not_block_each_other(disk: Disk, ahead: ReadAhead) -> None:
    """What one that waits for room shares with one that ends makes no room scarce for those before it."""
    disk.let_through.set()
    wait_for(ahead, "abcdefgh")
    assert not any([ready(ahead, "ijkl"), ready(ahead, "ahxyzvw")])
    ahead.release("abcdefgh")
    wait_for(ahead, "ijkl")
    ahead.release("ijkl")
    wait_for(ahead, "ahxyzvw")


def test_what_an_aborted_request_has_not_read_is_not_read(disk: Disk, ahead: ReadAhead) -> None:
    assert not ready(ahead, "abcdefgh")
    ahead.release("abcdefgh")
    disk.let_through.set()
    ahead.clear()
    assert len(disk.begun) <= 4, "those that had begun"


def test_what_is_damaged_or_cannot_be_read_keeps_nobody_waiting(disk: Disk, ahead: ReadAhead) -> None:
    disk.lost = "a"
    disk.let_through.set()
    wait_for(ahead, "a!b")
    lost, failed = ahead.get("a"), ahead.get("!")
    assert lost is not None
    assert lost.result() is None
    assert failed is not None
    with pytest.raises(OSError, match="a disk failed"):
        failed.result()


def test_what_was_deleted_is_read_again(disk: Disk, ahead: ReadAhead) -> None:
    disk.let_through.set()
    wait_for(ahead, "a")
    ahead.drop("a")
    wait_for(ahead, "a")
    assert disk.begun == ["a", "a"]


def test_after_a_reset_nothing_is_left(disk: Disk, ahead: ReadAhead) -> None:
    assert not ready(ahead, "abcdefgh")
    disk.let_through.set()
    ahead.clear()
    assert ahead.get("a") is None
