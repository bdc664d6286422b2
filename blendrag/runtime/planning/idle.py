"""When the engine has time for work that no request waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

T = TypeVar("T")

_PREFILL_TOKENS = 32
"""A request with more tokens than that in a step is not decoding, speculation included."""

KEEPS_STEPPING = hasattr(KVConnectorBase_V1, "has_pending_push_work")
"""Whether vLLM goes on stepping for us; where it does not, an idle step is the last one."""


def prefills(step: SchedulerOutput) -> bool:
    """Whether a step computes somebody's prompt."""
    counts = step.num_scheduled_tokens.values()
    return bool(step.scheduled_new_reqs) or any(count > _PREFILL_TOKENS for count in counts)


def idle(step: SchedulerOutput) -> bool:
    """Whether a step computes nothing for anybody."""
    return bool(step.total_num_scheduled_tokens == 0)


class AfterFirstToken(Generic[T]):
    """Things that are due when their requests have their first token, or have ended."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Request, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._waiting)

    def add(self, request: Request, item: T) -> None:
        """Takes a thing that belongs to a request."""
        self._waiting.append((request, item))

    def due(self) -> list[T]:
        """Hands out, once, what has become due."""
        due, still = [], []
        for request, item in self._waiting:
            if request.num_output_tokens or request.is_finished():
                due.append(item)
            else:
                still.append((request, item))
        self._waiting = still
        return due
