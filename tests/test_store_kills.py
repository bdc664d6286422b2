"""Writers that are killed at random moments: all that they acknowledged is there and right, and nothing else is wrong.

`make test-hard` kills a hundred times as many.  (`test_store_processes` kills before every single call, once.)
"""

from __future__ import annotations

import multiprocessing
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from blendrag.store import ChunkStore
from blendrag.store.rows import NewEntry
from tests.test_store_disk import files_in
from tests.test_store_entry import make_entry, make_key, same
from tests.test_store_processes import start

NUMBER = struct.Struct("<I")
WRITERS = 2


def child_write(path: Path, first: int, acknowledge: Any, budget: int | None) -> None:
    """Stores entries, one or several at a time, for as long as it lives; writes the number of each that is stored."""
    with ChunkStore(path, disk_bytes=budget) as store:
        for start in range(first, 2**31, 5):
            for numbers in ([start], [start + 1, start + 2, start + 3], [start + 4]):
                store.put_all([NewEntry(make_key(number), make_entry(number), "model", "default")
                               for number in numbers])
                if numbers[0] % 5 == 4:
                    store.delete(make_key(numbers[0]))
                for number in numbers:
                    acknowledge.send(number)


def kill_writers(path: Path, first: int, chance: random.Random, budget: int | None) -> list[int]:
    """Numbers that were acknowledged until all writers were killed, each after a random number of its own."""
    acknowledged: list[int] = []
    writers = []
    for writer in range(WRITERS):
        reading, writing = multiprocessing.Pipe(duplex=False)
        writers.append((start(child_write, path, first + writer * 10_000, writing, budget), reading))
        writing.close()
    for process, reading in writers:
        for _ in range(chance.randrange(12)):
            acknowledged.append(reading.recv())
        process.kill()
    for process, reading in writers:
        process.join()
        while reading.poll():  # what it said before it died
            try:
                acknowledged.append(reading.recv())
            except EOFError:
                break
        reading.close()
    return acknowledged


@pytest.mark.parametrize("budget", [None, 12_000])
def test_killed_writers(tmp_path: Path, budget: int | None, request: pytest.FixtureRequest) -> None:
    kills = request.config.getoption("--kills")
    total = 0
    for number in range(-(-kills // WRITERS)):
        path = tmp_path / str(number // 10)
        first = 100_000 * number
        acknowledged = kill_writers(path, first, random.Random(f"kills {number}"), budget)
        total += len(acknowledged)
        with ChunkStore(path, ram_bytes=0) as store:
            tried = {n + more for n in acknowledged for more in range(4)}
            stored = {make_key(n): n for n in tried | {first + writer * 10_000 for writer in range(WRITERS)}}
            present = store.present(list(stored))
            for key in present:
                assert same(store.get(key), make_entry(stored[key])), f"kill {number}"
            deleted = [n for n in acknowledged if n % 5 == 4]
            assert not present & {make_key(n) for n in deleted}
            if budget is None:
                assert {make_key(n) for n in acknowledged if n % 5 != 4} <= present, f"kill {number}"
            else:
                assert store.stats.disk_bytes <= budget
            assert store.stats.damaged == 0
            assert len(files_in(path)) == store.stats.disk_entries, "an unfinished file was left"
    assert total > kills
