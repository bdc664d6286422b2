"""The blend passes of requests, a few forwards in each step of the engine."""

from __future__ import annotations

import logging
from collections import deque
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


class _Pass:
    """A job under way.

    Attributes:
        tile: the forward that it needs next; None once it has ended.
        alone: a forward that it shared with others failed.
    """

    def __init__(self, job: BlendJob) -> None:
        self.job = job
        self.alone = False
        self.tile: Tile | None = None
        self.passes: Passes[BlendReport] | None = None


class PassQueue:
    """First come, first served.

    How a prompt is cut into forwards follows from the prompt alone, never from what else runs.

    Args:
        shared_rows: small forwards of several requests are one, of so many rows at most.
        context_tokens: see `CONTEXT_TOKENS`.
    """

    def __init__(self, blender: Blender, shared_rows: int = 0, context_tokens: int = CONTEXT_TOKENS["cpu"]) -> None:
        self.blender = blender
        self._context_tokens = context_tokens
        self._shared_rows = shared_rows
        self._waiting: deque[BlendJob] = deque()
        self._running: list[_Pass] = []
        self._reports: dict[str, BlendReport] = {}

    def add(self, jobs: Iterable[BlendJob]) -> None:
        """Takes jobs, behind those there are."""
        self._waiting.extend(jobs)

    def advance(self, rows: int) -> dict[str, BlendReport]:
        """Runs forwards until so many rows are computed, reading contexts counted as rows; one at least.

        Returns:
            Reports of the jobs that ended, by request.
        """
        computed = 0
        while computed < rows and (batch := self._batch(rows - computed, computed == 0)):
            computed += sum(self._cost(one.tile) for one in batch if one.tile is not None)
            self._run(batch)
        reports, self._reports = self._reports, {}
        return reports

    def drop(self, request_ids: Collection[str]) -> set[str]:
        """Forgets the jobs of requests; returns those that had one."""
        dropped = {job.request_id for job in self._waiting if job.request_id in request_ids}
        self._waiting = deque(job for job in self._waiting if job.request_id not in dropped)
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
        if number == len(self._running) and self._waiting:
            self._running.append(_Pass(self._waiting.popleft()))
        if number >= len(self._running):
            return None
        one = self._running[number]
        if one.passes is None:
            one.passes = self.blender.passes(one.job)
            self._proceed(one, one.passes.send, None)
        return one

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
            self._reports[one.job.request_id] = end.value

    def _cost(self, tile: Tile) -> int:
        """What a forward takes, in rows."""
        return rows_of(tile) + sum(lane.context_tokens for lane, _ in tile) // self._context_tokens
