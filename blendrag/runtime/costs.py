"""How long vLLM's own prefill and a blend pass take on this machine, as far as is known before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scoring:
    """One scoring pass of a prompt.

    Attributes:
        rows: rows it computes.
        depth: share of the model's layers that it runs through.
        weighed: pairs of a row and a context token whose attention it measures, times the share of the layers in
            which it does.
    """

    rows: int
    depth: float
    weighed: float = 0.0


@dataclass(frozen=True)
class PassWork:
    """What blending one prompt takes; counts are tokens of the prompt.

    Attributes:
        tokens: its length.
        fresh: rows of no stored chunk.
        recomputed: tokens of stored chunks that are computed again.
        moved: tokens of stored chunks that move along with those (`blendrag.policies.Selective.reach`).
        placements: stored entries that stand in it.
        pairs: sum over all computed rows of the tokens that each attends to.
        scoring: the passes before the blend pass.
        on_disk: tokens whose KV has to be read from the disk.
    """

    tokens: int
    fresh: int
    recomputed: int = 0
    moved: int = 0
    placements: int = 1
    pairs: float = 0.0
    scoring: tuple[Scoring, ...] = ()
    on_disk: int = 0


@dataclass(frozen=True)
class Costs:
    """Seconds that parts of a prefill take, measured at start-up (`blendrag.runtime.passes.measuring`).

    A forward over n rows takes `max(floor, step + n * row)` and its attention: with few rows all weights are read
    nevertheless.

    Attributes:
        vllm_floor, vllm_step: of a step of vLLM, sampling included.
        row: of a row in all layers, but for attention.
        vllm_pair: of a row's attention to one context token, in all layers.
        pass_floor, pass_step, pass_row, pass_pair: the same of a pass.
        weigh: of measuring one row's attention to one context token, in all layers.
        place: of loading, moving and writing one token's KV, in all layers.
        piece: of one more entry among those that are placed.
        drift: of moving one token's KV along with its neighbours'.
        again: share of `place` that a pass after a scoring pass takes once more: 0 where the KV is kept, or 1.
        disk: of reading one token's KV from the disk tier.
        step_tokens: tokens that a forward takes (`max_num_batched_tokens`).
        margin: a pass has to be estimated at less than this share of a full prefill.
    """

    vllm_floor: float
    vllm_step: float
    row: float
    vllm_pair: float
    pass_floor: float
    pass_step: float
    pass_row: float
    pass_pair: float
    weigh: float
    place: float
    piece: float
    drift: float
    again: float
    disk: float
    step_tokens: float
    margin: float = 0.9

    def prefill(self, tokens: int, cached: int = 0) -> float:
        """Of computing `tokens` tokens behind `cached` ones in steps of vLLM, up to the first sampled token."""
        seconds = 0.0
        for start in range(0, tokens, max(1, int(self.step_tokens))):
            rows = min(int(self.step_tokens), tokens - start)
            pairs = rows * (cached + start + rows / 2)
            seconds += max(self.vllm_floor, self.vllm_step + rows * self.row) + pairs * self.vllm_pair
        return seconds

    def blend(self, work: PassWork) -> float:
        """Of a blend pass with its scoring passes, and of vLLM's step for the last token."""
        ready = 0.0 if self.again else max((scoring.depth for scoring in work.scoring), default=0.0)
        return (self.prefill(1, work.tokens - 1) + work.on_disk * self.disk + self.scoring(work)
                + self._forwards(work.fresh + work.recomputed) + work.pairs * self.pass_pair
                + (1 - ready) * self._placing(work) + work.moved * self.drift)

    def scoring(self, work: PassWork) -> float:
        """Of the passes before the blend pass."""
        seconds = ready = 0.0  # share of the layers whose KV is at its place
        for scoring in work.scoring:
            attention = scoring.rows * work.tokens * self.pass_pair
            seconds += scoring.depth * (self._forwards(scoring.rows) + attention) + scoring.weighed * self.weigh
            seconds += max(0.0, scoring.depth - ready) * self._placing(work)
            ready = 0.0 if self.again else max(ready, scoring.depth)
        return seconds

    def _forwards(self, rows: int) -> float:
        """Of a pass over so many rows in all layers, without attention."""
        full, rest = divmod(max(1, rows), int(self.step_tokens))
        sizes = [self.step_tokens] * full + [float(rest)] * (rest > 0)
        return sum(max(self.pass_floor, self.pass_step + size * self.pass_row) for size in sizes)

    def _placing(self, work: PassWork) -> float:
        """Of bringing the stored KV of all layers to its places."""
        return work.tokens * self.place + work.placements * self.piece
