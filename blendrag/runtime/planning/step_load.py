"""What a step of the engine computes, and what fits in beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

T = TypeVar("T")

_PREFILL_TOKENS = 32
"""A request with more tokens than that in a step is not decoding, speculation included."""
_LEAST_SHARE = 4
"""Where vLLM's own prefills fill every step, passes get this fraction of every second one."""


@dataclass(frozen=True)
class StepLoad:
    """A step of the engine.

    Attributes:
        tokens: that vLLM computes.
        prefills: a prompt is computed in it, by vLLM or by a blend pass.
    """

    tokens: int
    prefills: bool

    @classmethod
    def of(cls, step: SchedulerOutput, passes: bool) -> StepLoad:
        """The load of what vLLM schedules, and whether requests wait for passes."""
        counts = step.num_scheduled_tokens.values()
        prefills = bool(step.scheduled_new_reqs) or any(count > _PREFILL_TOKENS for count in counts)
        return cls(step.total_num_scheduled_tokens, prefills or passes)

    @property
    def idle(self) -> bool:
        """Whether it computes nothing for anybody."""
        return self.tokens == 0 and not self.prefills


class PassBudget:
    """Rows that blend passes may compute in a step: what vLLM itself would have computed of their prompts.

    So a step takes no longer than one of chunked prefill, and decoding requests notice no difference.

    Args:
        batch_tokens: tokens in a step, at most (`max_num_batched_tokens`).
        step_tokens: rows beside other requests, at most; see `BlendConfig.pass_step_tokens`.
    """

    def __init__(self, batch_tokens: int, step_tokens: int | None) -> None:
        self._batch_tokens = batch_tokens
        self._step_tokens = batch_tokens if step_tokens is None else step_tokens
        self._waited = False

    def rows(self, load: StepLoad) -> int:
        """Rows of this step."""
        if load.tokens == 0:
            return self._batch_tokens
        rows = min(self._step_tokens, self._batch_tokens - load.tokens)
        least = min(self._step_tokens, self._batch_tokens // _LEAST_SHARE)
        if rows >= least:
            self._waited = False
            return rows
        self._waited = not self._waited
        return max(rows, 0) if self._waited else least


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
