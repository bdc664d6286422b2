"""Encodes chunks that requests brought along and that are not stored, once nobody waits for a first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from blendrag.runtime.messages import Missing
from blendrag.runtime.planning.idle import KEEPS_STEPPING, AfterFirstToken, idle, prefills

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_BUSY_TOKENS = 512
"""Chunk tokens encoded in one step that decodes for somebody: as long as another request's prefill would be."""
_IDLE_TOKENS = 8192

_PATIENCE = 16
"""Steps on end that compute prompts before chunks have a turn all the same: an engine that is never without prompts is
the one that needs stored chunks the most.  With the usual 2,048 tokens a step that takes it 2 % longer."""


class Populator:
    """The scheduler half's queue of chunks to encode; each is in it once, whoever brought it.

    Args:
        key: names a chunk.
        present: which of some keys are stored.
    """

    def __init__(self, key: Callable[[Missing], str], present: Callable[[list[str]], set[str]]) -> None:
        self._key, self._present = key, present
        self._waiting: AfterFirstToken[list[str]] = AfterFirstToken()
        self._wanted: dict[str, Missing] = {}
        self._ready: dict[str, None] = {}
        self._running: list[str] = []
        self._waited = 0

    def add(self, request: Request, missing: Sequence[Missing]) -> None:
        """Takes what a request missed, which becomes due with its first token."""
        keys = [self._key(chunk) for chunk in missing]
        self._wanted |= dict(zip(keys, missing, strict=True))
        self._waiting.add(request, keys)

    def take(self, step: SchedulerOutput) -> list[Missing]:
        """The chunks to encode in a step; few where it decodes for somebody, seldom any where it computes a prompt."""
        if not self._wanted or self._running:
            return []
        self._admit()
        if not self._ready:
            return []
        if prefills(step) and self._waited < _PATIENCE:
            self._waited += 1
            return []
        self._waited = 0
        budget = _BUSY_TOKENS if not idle(step) else _IDLE_TOKENS if KEEPS_STEPPING else None
        self._drop(self._present(list(self._ready)))
        tokens = 0
        for key in self._ready:
            tokens += len(self._wanted[key].ids)
            if self._running and budget is not None and tokens > budget:
                break
            self._running.append(key)
        return [self._wanted[key] for key in self._running]

    def done(self) -> None:
        """The worker is done with what was last taken, stored or not: a chunk that fails is not tried for ever."""
        self._drop(self._running)
        self._running = []

    @property
    def pending(self) -> bool:
        """Whether there is anything to do now, or under way."""
        self._admit()
        return bool(self._ready or self._running)

    def _admit(self) -> None:
        for keys in self._waiting.due():
            self._ready |= dict.fromkeys(key for key in keys if key in self._wanted)

    def _drop(self, keys: Sequence[str] | set[str]) -> None:
        for key in keys:
            self._ready.pop(key, None)
            self._wanted.pop(key, None)
