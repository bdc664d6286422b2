"""What one tensor-parallel rank lacks none of them has, however it got lost."""

import pytest
import torch

from blendrag.runtime.passes import entries as entries_module
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.entries import Entries
from blendrag.store import ChunkStore
from blendrag.store.keys import NEUTRAL, rank_keys
from tests.test_store_entry import SHAPE, make_entry


class TwoRanks:
    """The first of two ranks; the other one has lost some of the entries."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.lost: set[int] = set()

    def local(self, key):
        return rank_keys(key, self.size)[self.rank]

    def common(self, fingerprint):
        return fingerprint

    def together(self, work):
        return work()

    def agree(self, have):
        return [there and number not in self.lost for number, there in enumerate(have)]


@pytest.fixture(params=["host", "device"])
def entries(request, monkeypatch):
    """Three of them, numbered 0 to 2, with a tier on the device (as far as the CPU can be one) or without."""
    monkeypatch.setattr(entries_module, "Ranks", TwoRanks)
    tier = DeviceTier("cpu", 2**20) if request.param == "device" else None
    with ChunkStore() as store:
        found = Entries(store, "model", tier)
        found.keys = [found.key("default", NEUTRAL, [number, 1, 2]) for number in range(3)]
        for number, key in enumerate(found.keys):
            found.put("default", key, make_entry(number))
        yield found


def loaded(entries):
    return [entry is not None for entry in entries.load(entries.keys)]


def test_what_another_rank_lost_since_the_plan_is_lost(entries):
    assert loaded(entries) == [True, True, True]
    entries.ranks.lost = {1}
    assert loaded(entries) == [True, False, True]
    assert entries.present(entries.keys) == {entries.keys[0], entries.keys[2]}


def test_what_this_rank_lost_is_a_miss(entries):
    entries._store.delete(entries.ranks.local(entries.keys[2]))
    assert loaded(entries) == [True, True, False]


def test_what_is_deleted_is_nowhere_and_counted_once(entries):
    loaded(entries)
    assert entries.delete([entries.keys[0], entries.keys[2], entries.key("default", NEUTRAL, [9])]) == 2
    assert loaded(entries) == [False, True, False]
    assert entries.delete(entries.keys) == 1


def test_a_store_that_cannot_be_read_is_a_miss(entries):
    entries._store.close()
    assert loaded(entries) == [False, False, False]


def test_an_entry_of_another_form_or_shorter_than_a_pass_reads_is_dropped(entries):
    """Kernels read what a placement says; a file that was put in an entry's place may be shorter or narrower."""
    layers, tokens, heads, size = SHAPE
    assert loaded(entries) == [True, True, True]
    entries._form = (torch.bfloat16, layers, heads, size)
    entries.tier = None
    assert [entry is not None for entry in entries.load(entries.keys, [tokens, tokens + 1, 0])] == [True, False, True]
    entries._form = (torch.bfloat16, layers, heads + 1, size)
    assert loaded(entries) == [False, False, False]
    entries._form = None
    assert loaded(entries) == [False, False, False]
    assert entries._store.keys() == []


def test_entries_are_read_before_a_pass_needs_them_and_deletions_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(entries_module, "Ranks", TwoRanks)
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        found = Entries(store, "model")
        keys = [found.key("default", NEUTRAL, [number, 1, 2]) for number in range(3)]
        for number, key in enumerate(keys):
            found.put("default", key, make_entry(number))
        needs = {"request": dict.fromkeys(keys, 3)}
        while not all(found.ready(needs, wait_s=1)):
            pass
        for key in keys[:2]:
            store.delete(found.ranks.local(key))
        assert found.delete([keys[1]]) == 0
        assert [entry is not None for entry in found.load(keys)] == [False, False, True]
        found.release("request")
        assert (store.stats.hits_disk, store.stats.misses) == (1, 2)
        found.close()
