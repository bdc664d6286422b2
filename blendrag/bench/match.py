"""What it costs to find stored chunks in a prompt, without an engine or a model."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from blendrag.machine import processor
from blendrag.store.index import ContentIndex
from blendrag.store.windows import prompt_ids

_VOCABULARY = 150_000
_SHORTEST, _LONGEST = 100, 500
_BETWEEN = 3
_WARM_UP = 10


@dataclass(frozen=True)
class Figure:
    """One kind of prompt; times are of one look-up, token ids given as a Python list.

    Attributes:
        found: share of the prompt's tokens that is found.
        median_ms, p95_ms: of the time, in milliseconds.
    """

    prompt: str
    chunks: float
    found: float
    median_ms: float
    p95_ms: float


class MatchBench:
    """An index of random chunks of 100 to 500 tokens, and prompts with and without them.

    Attributes:
        add_us: cost of adding one chunk, token ids given as a Python list, in microseconds.
    """

    def __init__(self, chunks: int, tokens: int) -> None:
        self._random = np.random.default_rng(0)
        self._tokens = tokens
        lengths = self._random.integers(_SHORTEST, _LONGEST + 1, chunks)
        self._pool = self._ids(int(lengths.sum()))
        self._ends = np.cumsum(lengths)
        self._lengths = lengths
        self._index = ContentIndex()
        seconds = 0.0
        for number in range(chunks):
            ids = self._chunk(number)
            key = f"{number:064x}"
            started = time.perf_counter()
            self._index.add(key, b"", ids)
            seconds += time.perf_counter() - started
        self.add_us = 1e6 * seconds / chunks

    def measure(self, repeats: int) -> list[Figure]:
        """Looks `repeats` different prompts of each kind up, in turns."""
        kinds = {"chunks as stored": self._stored, "both edges of each differ": self._edges,
                 "no stored chunk": self._new}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
        for number in range(repeats + _WARM_UP):
            for kind, make in kinds.items():
                prompt = make()
                started = time.perf_counter()
                matches = self._index.find(prompt)
                seconds = time.perf_counter() - started
                if number >= _WARM_UP:
                    times[kind].append(1e3 * seconds)
                    found[kind].append((len(matches), sum(match.end - match.start for match in matches)))
        return [Figure(kind, statistics.mean(count for count, _ in found[kind]),
                       statistics.mean(tokens for _, tokens in found[kind]) / self._tokens,
                       statistics.median(times[kind]), float(np.percentile(times[kind], 95))) for kind in kinds]

    def conversion_ms(self, repeats: int) -> float:
        """The part of a look-up that turns a Python list into an array, in milliseconds, median."""
        times: list[float] = []
        for _ in range(repeats):
            prompt = self._new()
            started = time.perf_counter()
            prompt_ids(prompt)
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)

    def _stored(self, edges: bool = False) -> list[int]:
        prompt: list[int] = []
        while True:
            ids = self._chunk(int(self._random.integers(len(self._ends))))
            if edges:
                ids[0] = ids[-1] = _VOCABULARY
            if len(prompt) + len(ids) + _BETWEEN > self._tokens:
                prompt += self._ids(self._tokens - len(prompt)).tolist()
                return prompt
            prompt += ids + self._ids(_BETWEEN).tolist()

    def _edges(self) -> list[int]:
        return self._stored(edges=True)

    def _new(self) -> list[int]:
        ids: list[int] = self._ids(self._tokens).tolist()
        return ids

    def _chunk(self, number: int) -> list[int]:
        end = self._ends[number]
        ids: list[int] = self._pool[end - self._lengths[number] : end].tolist()
        return ids

    def _ids(self, count: int) -> Any:
        return self._random.integers(0, _VOCABULARY, count, np.int32)


def table(figures: Sequence[Figure], chunks: int, tokens: int) -> Table:
    """The figures for a terminal."""
    result = Table(title=f"Finding chunks: {chunks:,} stored, prompts of {tokens:,} tokens")
    for heading in ("prompt", "chunks found", "share found", "median", "95th percentile"):
        result.add_column(heading, justify="left" if heading == "prompt" else "right")
    for f in figures:
        result.add_row(f.prompt, f"{f.chunks:.0f}", f"{f.found:.0%}", f"{f.median_ms:.2f} ms", f"{f.p95_ms:.2f} ms")
    return result


def machine() -> str:
    """One line about the machine and how busy it is."""
    return (f"{processor()}, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
            f"numpy {np.__version__}")
