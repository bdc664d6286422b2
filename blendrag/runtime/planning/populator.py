"""Encodes chunks that requests brought along and that are not stored, once nobody waits for a first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from blendrag.runtime.messages import Missing

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_BUSY_TOKENS = 512
"""Chunk tokens encoded in one step that decodes for somebody: as long as another request's prefill would be."""
_IDLE_TOKENS = 8192
_PREFILL_TOKENS = 32
"""A request with more tokens than that in a step is not decoding, speculation included."""

_KEEPS_STEPPING = hasattr(KVConnectorBase_V1, "has_pending_push_work")


class Populator:
    """The scheduler half's queue of chunks to encode; each is in it once, whoever brought it.

    Args:
        key: names a chunk.
        present: which of some keys are stored.
    """

    def __init__(self, key: Callable[[Missing], str], present: Callable[[list[str]], set[str]]) -> None:
        self._key, self._present = key, present
        self._waiting: list[tuple[Request, list[str]]] = []
        self._wanted: dict[str, Missing] = {}
        self._ready: dict[str, None] = {}
        self._running: list[str] = []

    def add(self, request: Request, missing: Sequence[Missing]) -> None:
        """Takes what a request missed, which becomes due with its first token."""
        keys = [self._key(chunk) for chunk in missing]
        self._wanted |= dict(zip(keys, missing, strict=True))
        self._waiting.append((request, keys))

    def take(self, step: SchedulerOutput) -> list[Missing]:
        """The chunks to encode in a step; none where the step computes somebody's prompt."""
        if not self._wanted or self._running:
            return []
        self._admit()
        counts = step.num_scheduled_tokens.values()
        if not self._ready or step.scheduled_new_reqs or any(count > _PREFILL_TOKENS for count in counts):
            return []
        idle = step.total_num_scheduled_tokens == 0
        # Where vLLM does not go on stepping for us, this idle step is the last one.
        budget = _BUSY_TOKENS if not idle else _IDLE_TOKENS if _KEEPS_STEPPING else None
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
        """Makes the chunks of requests due that have their first token, or have ended."""
        still = []
        for request, keys in self._waiting:
            if request.num_output_tokens or request.is_finished():
                self._ready |= dict.fromkeys(key for key in keys if key in self._wanted)
            else:
                still.append((request, keys))
        self._waiting = still

    def _drop(self, keys: Sequence[str] | set[str]) -> None:
        for key in keys:
            self._ready.pop(key, None)
            self._wanted.pop(key, None)
