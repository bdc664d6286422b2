"""The blend passes of requests, a few forwards in each step of the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import Any

from blendrag.runtime.messages import BlendJob, BlendReport
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.forward import Passes, Tile, rows_of

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = {"cpu": 8, "cuda": 32}
"""Placing and reading so many tokens of a context takes as long as computing a row (SmolLM2 on 2 CPU cores; the shape
of an 8B model on an H200)."""
SHARED_ROWS = 256
"""A forward of fewer rows takes a GPU about as long as one of a single row: it waits for the weights."""
_READ_S = 0.005
"""How long a step with nothing to compute waits for a read, instead of making the engine spin."""


class _Pass:
    """A job under way.

    Attributes:
        tile: the forward that it needs next; None once it has ended.
        alone: a forward that it shared with others failed.
        ready: its entries are in memory, on all ranks.
        waited_s: for its entries, in seconds.
    """

    def __init__(self, job: BlendJob) -> None:
        self.job = job
        self.since = time.perf_counter()
        self.ready = False
        self.waited_s = 0.0
        self.alone = False
        self.tile: Tile | None = None
        self.passes: Passes[BlendReport] | None = None


class PassQueue:
    """First come, first served, among those whose entries are in memory; those of the others are read meanwhile.

    How a prompt is cut into forwards follows from the prompt alone, never from what else runs.

    Args:
        shared_rows: small forwards of several requests are one, of so many rows at most.
        context_tokens: see `CONTEXT_TOKENS`.
    """

    def __init__(self, blender: Blender, shared_rows: int = 0, context_tokens: int = CONTEXT_TOKENS["cpu"]) -> None:
        self.blender = blender
        self._context_tokens = context_tokens
        self._shared_rows = shared_rows
        self._waiting: list[_Pass] = []
        self._running: list[_Pass] = []
        self._reports: dict[str, BlendReport] = {}

    def add(self, jobs: Iterable[BlendJob]) -> None:
        """Takes jobs, behind those there are."""
        self._waiting.extend(map(_Pass, jobs))

    def advance(self, rows: int, idle: bool = False) -> dict[str, BlendReport]:
        """Runs forwards until so many rows are computed, reading contexts counted as rows; one at least.

        Args:
            idle: the engine has nothing else to do in this step.

        Returns:
            Reports of the jobs that ended, by request.
        """
        self._read(idle)
        computed = 0
        while computed < rows and (batch := self._batch(rows - computed, computed == 0)):
            computed += sum(self._cost(one.tile) for one in batch if one.tile is not None)
            self._run(batch)
        reports, self._reports = self._reports, {}
        return reports

    def drop(self, request_ids: Collection[str]) -> set[str]:
        """Forgets the jobs of requests; returns those that had one."""
        dropped = {one.job.request_id for one in self._waiting if one.job.request_id in request_ids}
        self._waiting = [one for one in self._waiting if one.job.request_id not in dropped]
        for request_id in dropped:
            self.blender.entries.release(request_id)
        for one in [one for one in self._running if one.job.request_id in request_ids]:
            dropped.add(one.job.request_id)
            self._running.remove(one)
            if one.passes is not None:
                one.passes.close()
        return dropped

    def restart(self, _fingerprint: str = "") -> None:
        """Begins anew with what is under way: the weights have changed, or stored chunks were left behind."""
        for one in self._running:
            if one.passes is not None:
                one.passes.close()
            one.passes = one.tile = None

    def _batch(self, room: int, first: bool) -> list[_Pass]:
        """The jobs whose forwards run next, as one; empty where none fits into the room."""
        batch: list[_Pass] = []
        shared = 0
        while (one := self._at(len(batch))) is not None:
            if one.tile is None:
                continue  # it has ended without a forward, and left
            rows = rows_of(one.tile)
            if batch and (one.alone or batch[0].alone or shared + rows > self._shared_rows):
                break
            if self._cost(one.tile) > room and not (first and not batch):
                break
            batch.append(one)
            shared, room = shared + rows, room - self._cost(one.tile)
            if not self._shared_rows:
                break
        return batch

    def _at(self, number: int) -> _Pass | None:
        """The job at a place of the queue, begun; None where there are not so many."""
        if number == len(self._running) and (ready := next((one for one in self._waiting if one.ready), None)):
            self._waiting.remove(ready)
            self._running.append(ready)
        if number >= len(self._running):
            return None
        one = self._running[number]
        if one.passes is None:
            one.passes = self.blender.passes(one.job)
            self._proceed(one, one.passes.send, None)
            self.blender.entries.release(one.job.request_id)
        return one

    def _read(self, idle: bool) -> None:
        """Begins to read what jobs need that came, and sees whose entries have arrived."""
        reading = [one for one in self._waiting if not one.ready]
        if not reading:
            return
        wait = idle and not self._running and len(reading) == len(self._waiting)
        needs = {one.job.request_id: self.blender.needs(one.job) for one in reading}
        for one, ready in zip(reading, self.blender.entries.ready(needs, _READ_S if wait else 0), strict=True):
            one.ready = ready
            one.waited_s = time.perf_counter() - one.since

    def _run(self, batch: list[_Pass]) -> None:
        tile = [part for one in batch if one.tile is not None for part in one.tile]
        try:
            seconds = self.blender.forward.timed_tile(tile)
        except Exception as error:
            if len(batch) == 1 and batch[0].passes is not None:
                self._proceed(batch[0], batch[0].passes.throw, error)
                return
            logger.warning("a forward of %d requests failed (%s), trying them one by one", len(batch), error)
            for one in batch:
                one.alone, one.passes, one.tile = True, None, None
            return
        for one in batch:
            assert one.passes is not None
            self._proceed(one, one.passes.send, seconds)

    def _proceed(self, one: _Pass, resume: Any, value: Any) -> None:
        """Lets a job go on to its next forward, or to its end."""
        try:
            one.tile = resume(value)
        except StopIteration as end:
            one.tile = None
            self._running.remove(one)
            end.value.load_s += one.waited_s
            self._reports[one.job.request_id] = end.value

    def _cost(self, tile: Tile) -> int:
        """What a forward takes, in rows."""
        return rows_of(tile) + sum(lane.context_tokens for lane, _ in tile) // self._context_tokens
