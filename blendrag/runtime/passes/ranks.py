"""The tensor-parallel ranks as one: they must pick the same rows, and agree on what each of them has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from blake3 import blake3
from vllm.distributed import get_tp_group

from blendrag.store.keys import rank_keys


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
