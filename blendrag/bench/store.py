"""What the store's disk tier adds to the disk itself."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from blendrag.errors import ConfigError
from blendrag.store import ChunkStore, KVEntry, entry_key
from blendrag.store.keys import NEUTRAL
from blendrag.store.rows import NewEntry

_LAYERS, _HEADS, _SIZE = 32, 8, 128
_TOKEN_BYTES = 2 * _LAYERS * _HEADS * _SIZE * 2  # keys and values in bfloat16: an 8B model's
_FILE = "raw"


@dataclass(frozen=True)
class Figure:
    """One operation at one size; medians.

    Attributes:
        megabytes: of an entry.
        seconds: for each entry.
        raw_s: what the file system alone takes for as many bytes.
    """

    what: str
    megabytes: int
    seconds: float
    raw_s: float

    @property
    def gb_s(self) -> float:
        """GB/s."""
        return self.megabytes * 2**20 / self.seconds / 1e9

    @property
    def ratio(self) -> float:
        """How many times as long as the file system alone."""
        return self.seconds / self.raw_s

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "gb_s": self.gb_s, "ratio": self.ratio}


def measure(folder: Path | None, megabytes: int, repeats: int, group: int) -> list[Figure]:
    """Times `put` and `get` of entries, one by one and `group` at a time, in turns with files of the same bytes.

    Args:
        folder: on the disk to measure; None for the system's temporary folder.
        megabytes: size of an entry.

    Raises:
        ConfigError: an entry of that size has no token.
    """
    tokens = megabytes * 2**20 // _TOKEN_BYTES
    if not tokens:
        raise ConfigError(f"an entry of {megabytes} MB holds no token: use 1 MB or more")
    content = torch.randint(256, (2, _LAYERS, tokens, _HEADS, _SIZE * 2), dtype=torch.uint8).view(torch.bfloat16)
    entry = KVEntry(content[0], content[1])
    seconds: dict[str, list[float]] = {}
    pin = torch.cuda.is_available()
    with TemporaryDirectory(dir=folder) as name, ChunkStore(Path(name) / "store", 0, pin) as store:
        raw = [Path(name) / f"{_FILE}{number}" for number in range(group)]

        def timed(what: str, work: Callable[[], object]) -> None:
            started = time.perf_counter()
            work()
            seconds.setdefault(what, []).append(time.perf_counter() - started)

        for number in range(repeats + 1):
            keys = [entry_key("bench", "default", NEUTRAL, [number, one]) for one in range(group + 1)]
            items = [NewEntry(key, entry, "bench", "default") for key in keys]
            timed("raw write", lambda: write(raw[:1], content))
            timed("put", lambda: store.put_all(items[:1]))  # noqa: B023
            timed("raw writes", lambda: write(raw, content))
            timed("puts", lambda: store.put_all(items[1:]))  # noqa: B023
            timed("raw read", lambda: read(raw[0], entry.nbytes))
            timed("get", lambda: store.get(keys[0]))  # noqa: B023
            with dropped([raw[0], store_file(store, keys[0])]):
                timed("cold raw read", lambda: read(raw[0], entry.nbytes))
                timed("cold get", lambda: store.get(keys[0]))  # noqa: B023
            store.clear()
    median = {what: statistics.median(times[1:]) for what, times in seconds.items()}
    return [Figure("put", megabytes, median["put"], median["raw write"]),
            Figure(f"put of {group} at once", megabytes, median["puts"] / group, median["raw writes"] / group),
            Figure("get", megabytes, median["get"], median["raw read"]),
            Figure("get, not in the page cache", megabytes, median["cold get"], median["cold raw read"])]


def table(figures: Sequence[Figure]) -> Table:
    """The figures side by side."""
    found = Table("", "entry", "GB/s", "ms", "raw ms", "times raw", title="Disk tier against write, fsync and read")
    for one in figures:
        found.add_row(one.what, f"{one.megabytes} MB", f"{one.gb_s:.2f}", f"{one.seconds * 1e3:.1f}",
                      f"{one.raw_s * 1e3:.1f}", f"{one.ratio:.2f}")
    return found


def write(paths: Sequence[Path], content: torch.Tensor) -> None:
    """Writes new files one after the other, each with a sync of its own."""
    data = content.view(-1).view(torch.uint8).numpy().data
    for path in paths:
        path.unlink(missing_ok=True)
        with path.open("xb", buffering=0) as file:
            left = data
            while len(left):
                left = left[file.write(left):]
            os.fsync(file.fileno())


def read(path: Path, size: int) -> torch.Tensor:
    """Reads a file into new memory."""
    memory = torch.empty(size, dtype=torch.uint8)
    left = memory.numpy().data
    with path.open("rb", buffering=0) as file:
        while len(left):
            left = left[file.readinto(left):]
    return memory


def store_file(store: ChunkStore, key: str) -> Path:
    """The file of an entry."""
    assert store.path is not None
    [path] = store.path.rglob(f"{key}.safetensors")
    return path


@contextmanager
def dropped(paths: Sequence[Path]) -> Iterator[None]:
    """Within it the files are not in the page cache, as far as the system does what it is asked."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield
