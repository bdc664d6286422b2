"""The tensor-parallel ranks as one: they must pick the same rows, and agree on what each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from blake3 import blake3
from vllm.distributed import get_tp_group

from blendrag.errors import StoreError
from blendrag.store.keys import rank_keys

T = TypeVar("T")


class Ranks:
    """This rank among its tensor-parallel group.  Every method but `local` is a meeting of all ranks.

    Attributes:
        size: how many there are; with one, nothing is communicated.
        rank: this one's number.
    """

    def __init__(self) -> None:
        self._group = get_tp_group()
        self.size: int = self._group.world_size
        self.rank: int = self._group.rank_in_group

    def local(self, key: str) -> str:
        """The name under which this rank keeps its share of an entry."""
        return rank_keys(key, self.size)[self.rank]

    def common(self, fingerprint: str) -> str:
        """One fingerprint for all ranks' weights."""
        if self.size == 1:
            return fingerprint
        every: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(every, fingerprint, group=self._group.cpu_group)
        return blake3("/".join(map(str, every)).encode()).hexdigest()

    def leading(self, value: float) -> float:
        """The first rank's number."""
        if self.size == 1:
            return value
        every: list[float | None] = [None] * self.size
        torch.distributed.all_gather_object(every, value, group=self._group.cpu_group)
        assert every[0] is not None
        return every[0]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank, once it has ended on all of them.

        A rank that raised alone would leave the others waiting for it in their next meeting.  `work` is no meeting.

        Raises:
            Exception: what `work` raised here.
            StoreError: it failed on another rank.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if all(self.agree([failure is None])):
            return result
        texts: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(texts, None if failure is None else str(failure),
                                            group=self._group.cpu_group)
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise failure or StoreError(f"it failed on rank {rank}: {text}")

    def agree(self, have: Sequence[bool]) -> list[bool]:
        """What all ranks have."""
        if self.size == 1 or not have:
            return list(have)
        flags = torch.tensor(have, dtype=torch.int32)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [bool(flag) for flag in flags.tolist()]

    def total(self, scores: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' scores."""
        return scores if self.size == 1 else self._group.all_reduce(scores)

    def first(self, rows: torch.Tensor) -> torch.Tensor:
        """The first rank's choice of rows, so that a tie is not broken in two ways."""
        return rows if self.size == 1 else self._group.broadcast(rows.to(torch.uint8)).bool()
