"""Sparse attention: which blocks of a prompt the recomputed rows of a chunk attend to.

Block sparsity over cached documents is an idea of LMCache's (`enable_sparse` of its CacheBlend, blocks of 32 tokens);
a window of recent tokens beside the tokens in which attention sinks is StreamingLLM's (arXiv 2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendrag.policies import Layout

BLOCK = 64


@dataclass(frozen=True)
class Sparsity:
    """What the rows of one prompt may see, besides the exact mask.

    A row sees the blocks of its group, its own block and the one before it, which are its last 64 to 128 tokens.

    Attributes:
        groups: int64 [tokens], the group of the row at each position: a number for each reused chunk, and the last
            number for all that is outside of them.
        allowed: bool [groups, blocks], the last line all true.
    """

    groups: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def choose(cls, layout: Layout, scores: torch.Tensor, budget: int) -> Sparsity | None:
        """Rows of a reused chunk see what is before the first one, their own, and the blocks that score best.

        Args:
            scores: float32 [tokens]; those of a block are added up.
            budget: tokens in the best blocks.  None is returned where that is the prompt: all rows see everything.
        """
        tokens = len(layout.reused)
        if budget >= tokens or not layout.chunks:
            return None
        blocks = -(-tokens // BLOCK)
        sums = torch.nn.functional.pad(scores, (0, blocks * BLOCK - tokens)).view(blocks, BLOCK).sum(1)
        prefix = max(1, -(-layout.chunks[0][0] // BLOCK))  # the first block in any case: attention sinks there
        allowed = torch.zeros(len(layout.chunks) + 1, blocks, dtype=torch.bool, device=scores.device)
        groups = torch.full((tokens,), len(layout.chunks), device=scores.device)
        allowed[:, prefix + sums[prefix:].topk(min(budget // BLOCK, blocks - prefix)).indices] = True
        allowed[:, :prefix] = True
        allowed[-1] = True
        for number, (start, end) in enumerate(layout.chunks):
            allowed[number, start // BLOCK : -(-end // BLOCK)] = True
            groups[start:end] = number
        return cls(groups, allowed)

    def permits(self, positions: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """bool [len(positions), len(blocks)]: which blocks each position may look into."""
        recent = blocks[None] >= positions[:, None] // BLOCK - 1
        return self.allowed[self.groups[positions]][:, blocks] | recent

    def order(self, positions: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Indices of rows such that those that see alike are neighbours, and how many are not of the last group."""
        groups = self.groups[positions]
        return groups.argsort(stable=True), int((groups < len(self.allowed) - 1).sum())

    def key_blocks(self, positions: torch.Tensor, height: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks that some row sees of each `height` rows, ascending: int32 [row blocks, blocks]; and how many.

        Args:
            positions: of the rows, in the order that they are cut into row blocks.
        """
        blocks = torch.arange(self.allowed.shape[1], device=positions.device)
        seen = self.permits(positions, blocks) & (blocks[None] * BLOCK <= positions[:, None])
        if window:
            seen &= (blocks[None] + 1) * BLOCK > positions[:, None] - window + 1
        seen = torch.nn.functional.pad(seen, (0, 0, 0, -len(positions) % height)).view(-1, height, len(blocks)).any(1)
        return (~seen).int().argsort(stable=True).int(), seen.sum(1).int()
