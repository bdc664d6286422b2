"""Damage of every kind: no crash, nothing wrong is served, and what is damaged costs itself alone.

`make test-hard` runs thousands of cases.  Each has a seed, which a failure shows; what failed stays in pytest's
temporary folder.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from blendrag.errors import StoreError
from blendrag.store import ChunkStore
from tests.test_store_disk import file_of
from tests.test_store_entry import CHUNK, SHAPE, find, make_entry, make_key, put, put_findable, same

Mutation = Callable[[random.Random, bytearray], bytearray]


def flip(chance: random.Random, content: bytearray) -> bytearray:
    for _ in range(chance.choice([1, 1, 2, 20])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def cut(chance: random.Random, content: bytearray) -> bytearray:
    return content[: chance.randrange(len(content))]


def extend(chance: random.Random, content: bytearray) -> bytearray:
    return content + chance.randbytes(chance.choice([1, 100, 5000]))


def zero(chance: random.Random, content: bytearray) -> bytearray:
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice([1, 16, 512, 4096]))
    content[start:end] = bytes(end - start)
    return content


def shuffle(chance: random.Random, content: bytearray) -> bytearray:
    """Two stretches change places, as pages that were written to the wrong block."""
    size = chance.choice([8, 64, 512])
    a, b = sorted(chance.randrange(max(1, len(content) - size)) for _ in range(2))
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    return content


def scribble(chance: random.Random, content: bytearray) -> bytearray:
    start = chance.randrange(len(content))
    noise = chance.randbytes(min(len(content) - start, chance.choice([1, 8, 100, 4096])))
    content[start : start + len(noise)] = noise
    return content


def describe(chance: random.Random, content: bytearray) -> bytearray:
    """A safetensors header that says something else."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    where = chance.choice([header, *header.values()])
    name = chance.choice(sorted(where))
    where[name] = chance.choice([None, -1, 2**70, "F32", "BOOL", [], [2, 5, 3, 9], [1, 10, 3, 8], {}, "x" * 1000])
    text = json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little")) + text + content[end:]


BYTES: list[Mutation] = [flip, cut, extend, zero, shuffle, scribble]


@contextmanager
def case(kind: str, number: int) -> Iterator[random.Random]:
    """The chances of one case, by which it can be had again."""
    try:
        yield random.Random(f"{kind} {number}")
    except BaseException as error:
        error.add_note(f"case {number} of {kind}")
        raise


def test_mutated_entries(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Where the row is made to fit, an entry of another content is as good as any, but never one of another form."""
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        for number in (1, 2):
            put(store, number, make_entry(number))
        file, intact = file_of(tmp_path, 1), file_of(tmp_path, 1).read_bytes()
        kept = 0
        for number in range(request.config.getoption("--mutated-entries")):
            with case("entries", number) as chance:
                content = bytes(chance.choice([*BYTES, describe, describe])(chance, bytearray(intact)))
                fitting = chance.random() < 0.5
                file.write_bytes(content)
                if fitting:
                    change(tmp_path, "UPDATE entries SET bytes = ?, checksum = ? WHERE key = ?", len(content),
                           blake3(content).hexdigest(), make_key(1))
                entry = store.get(make_key(1))
                if fitting and entry is not None:
                    assert (tuple(entry.k.shape), entry.k.dtype) == (SHAPE, make_entry(1).k.dtype)
                    kept += 1
                    store.delete(make_key(1))
                else:
                    assert entry is None or content == intact
                assert same(store.get(make_key(2)), make_entry(2))
                put(store, 1, make_entry(1))
                intact = file.read_bytes()  # safetensors writes its metadata in any order
        assert kept, "a case that shows nothing"


def change(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path / "manifest.sqlite3")
    with connection:
        connection.execute(statement, values)
    connection.close()


def mutate_rows(chance: random.Random, path: Path) -> None:
    """A value of another kind in some row of some table."""
    table, columns = chance.choice([
        ("entries", ["key", "fingerprint", "namespace", "file", "bytes", "tokens", "checksum", "dtype", "shape",
                     "created", "last_used"]),
        ("findable", ["number", "key", "fingerprint", "namespace", "prefix", "ids"]),
        ("totals", ["entries", "bytes"]), ("sqlite_sequence", ["name", "seq"])])
    value = chance.choice([b"", b"\xff\xfe", "", "x", "../../x", -1, 0, 2**62, 1.5, chance.randbytes(32),
                           chance.randbytes(4 * CHUNK), "0" * 64])
    try:
        change(path, f"UPDATE {table} SET {chance.choice(columns)} = ? WHERE random() % 2", value)
    except sqlite3.Error:  # a table refuses some values
        change(path, f"DELETE FROM {table} WHERE random() % 2")


def use(path: Path) -> None:
    """Everything that is done with a store; what it serves is what was stored."""
    with ChunkStore(path, ram_bytes=0, disk_bytes=20_000) as store:
        for number in range(1, 4):
            entry = store.get(put_key(number))
            assert entry is None or same(entry, make_entry(number, (1, CHUNK, 1, 2)))
            assert set(find(store, number)) <= {put_key(number)}
            served = store.get(make_key(number))
            assert served is None or same(served, make_entry(number))
        assert store.present(store.keys()) <= set(store.keys())
        assert store.stats.entries >= 0
        entry = store.get(put_findable(store, 9))  # a table out of order may not find it again
        assert entry is None or same(entry, make_entry(9, (1, CHUNK, 1, 2)))
        store.delete(make_key(1))
        store.clear(namespace="default")


def put_key(number: int) -> str:
    with ChunkStore() as store:
        return put_findable(store, number)


def test_mutated_manifests(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    template, path = tmp_path / "template", tmp_path / "store"
    with ChunkStore(template) as store:
        for number in range(1, 4):
            put(store, number, make_entry(number))
            put_findable(store, number)
    survived = refused = 0
    for number in range(request.config.getoption("--mutated-manifests")):
        shutil.copytree(template, path)
        with case("manifests", number) as chance:
            manifest = path / "manifest.sqlite3"
            if chance.random() < 0.4:
                mutate_rows(chance, path)
            else:
                manifest.write_bytes(chance.choice(BYTES)(chance, bytearray(manifest.read_bytes())))
            try:
                use(path)
                survived += 1
            except StoreError:
                refused += 1
        shutil.rmtree(path)
    assert survived
    assert refused
