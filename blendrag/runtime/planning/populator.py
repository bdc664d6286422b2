"""Encodes chunks that requests brought along and that are not stored, once nobody waits for a first token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from blendrag.runtime.messages import EncodeReport, Missing
from blendrag.runtime.planning.step_load import AfterFirstToken, StepLoad

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_BUSY_S = 0.1
"""What encoding may add to a step in which a request decodes."""
_IDLE_S = 0.25
"""Length of a step that computes nothing else: a request that comes meanwhile waits for its end."""
_IDLE_TOKENS = 8192

_FIRST_TOKENS = 32
"""Of the first step, which shows how fast this machine is."""
_LEAST_TOKENS = 16

_PATIENCE = 16
"""Steps on end that compute prompts before chunks have a turn all the same: an engine that is never without prompts is
the one that needs stored chunks the most.  With the usual 2,048 tokens a step that takes it 2 % longer."""


class Populator:
    """The scheduler side's queue of chunks to encode; each is in it once, whichever request brought it.

    Args:
        key: names a chunk.
        present: which of some keys are stored.
        max_tokens: a longer chunk is not encoded: the model has no positions for it.
        step_tokens: chunk tokens in one step that decodes, at most.
        queue_tokens: chunk tokens that may wait; the oldest leave first.

    Attributes:
        dropped: chunks that left the queue to make room: computed for their requests, and not stored.
    """

    def __init__(self, key: Callable[[Missing], str], present: Callable[[list[str]], set[str]], max_tokens: int,
                 step_tokens: int, queue_tokens: int) -> None:
        self._key, self._present = key, present
        self._max_tokens, self._step_tokens, self._queue_tokens = max_tokens, step_tokens, queue_tokens
        self._waiting: AfterFirstToken[list[str]] = AfterFirstToken()
        self._chunks: dict[str, Missing] = {}
        self._tokens = 0
        self._ready: dict[str, None] = {}
        self._running: dict[str, int] = {}
        self._rows_left = self._ended = 0
        self._rate: float | None = None
        self._steps_waited = 0
        self.dropped = 0

    def add(self, request: Request, missing: Sequence[Missing]) -> None:
        """Takes what a request missed, which becomes due with its first token."""
        longest = min(self._max_tokens, self._queue_tokens)
        brought = {self._key(chunk): chunk for chunk in missing if len(chunk.ids) <= longest}
        for key, chunk in brought.items():
            if key not in self._chunks:
                self._chunks[key] = chunk
                self._tokens += len(chunk.ids)
        self._make_room()
        self._waiting.add(request, list(brought))

    def take(self, step: StepLoad) -> tuple[list[Missing], int]:
        """The chunks to begin with in a step, and the rows to compute, of them and of those that are under way.

        Few rows where the step decodes for somebody, seldom any where it computes a prompt.
        """
        if not self.pending:
            return [], 0
        if step.prefills and self._steps_waited < _PATIENCE:
            self._steps_waited += 1
            return [], 0
        self._steps_waited = 0
        rows = self._rows(step)
        room, starting = rows - self._rows_left, []
        while room > 0 and self._ready:
            for key in self._next(room):
                length = len(self._chunks[key].ids)
                del self._ready[key]
                self._running[key] = length
                self._rows_left += length
                room -= length
                starting.append(self._chunks[key])
        return starting, rows if self._running else 0

    def done(self, report: EncodeReport) -> None:
        """The worker's report of a step.  What is done with, stored or not, is not tried again."""
        ended = list(self._running)[: report.done - self._ended]
        self._ended = report.done
        for key in ended:
            del self._running[key]
        self._rows_left = max(0, self._rows_left - report.rows) if self._running else 0
        self._drop(ended)
        # A last few rows take as long as many more would have taken.
        if report.rows > _LEAST_TOKENS or (report.rows and self._rate is None):
            measured = report.rows / max(report.seconds, 1e-6)
            self._rate = measured if self._rate is None else (self._rate + measured) / 2

    @property
    def pending(self) -> bool:
        """Whether there is anything to do now, or under way."""
        for keys in self._waiting.due():
            self._ready |= dict.fromkeys(key for key in keys if key in self._chunks and key not in self._running)
        return bool(self._ready or self._running)

    def _rows(self, step: StepLoad) -> int:
        most, seconds = (_IDLE_TOKENS, _IDLE_S) if step.idle else (self._step_tokens, _BUSY_S)
        return max(_LEAST_TOKENS, min(most, _FIRST_TOKENS if self._rate is None else int(self._rate * seconds)))

    def _next(self, tokens: int) -> list[str]:
        """The first chunks that are ready and not stored, as many as begin within so many tokens."""
        keys: list[str] = []
        for key in self._ready:
            if tokens <= 0:
                break
            keys.append(key)
            tokens -= len(self._chunks[key].ids)
        stored = self._present(keys)
        self._drop(stored)
        return [key for key in keys if key not in stored]

    def _make_room(self) -> None:
        if self._tokens <= self._queue_tokens:
            return
        before = self.dropped
        for key in [key for key in self._chunks if key not in self._running]:
            self._drop([key])
            self.dropped += 1
            if self._tokens <= self._queue_tokens:
                break
        if self.dropped.bit_length() > before.bit_length():  # 1, 2, 4, 8, ...
            logger.warning("%d chunks that requests brought were computed, not stored: more come than can be encoded "
                           "beside requests; store them ahead with `blendrag index`", self.dropped)

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ready.pop(key, None)
            chunk = self._chunks.pop(key, None)
            self._tokens -= len(chunk.ids) if chunk is not None else 0
