"""Whether a request is blended at all, or left to vLLM's full prefill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from blendrag.policies import Attention, Selective
from blendrag.runtime.costs import Costs, PassWork, Scoring
from blendrag.runtime.messages import Placement
from blendrag.runtime.planning.placing import Plan

_USUAL_RATIO = 0.15
_READ_SHARE = 4
"""Where nothing was measured: reading a context in two passes takes as long as computing this fraction of its rows."""
_LEAD = 64  # rows of a scoring pass before the first chunk, at most (`blendrag.runtime.passes.lanes`)


@dataclass(frozen=True)
class Decision:
    """What becomes of a request.

    Attributes:
        blend: run the blend pass.
        prefill_s, blend_s: what either is estimated to take up to the first token, in seconds; 0.0: not estimated.
    """

    blend: bool
    prefill_s: float = 0.0
    blend_s: float = 0.0


class Gate:
    """Leaves a request to vLLM where that is estimated to be about as quick.

    Args:
        costs: of this machine; None: not measured, or not wanted, and whatever has fewer rows to compute is blended.
        num_layers: of the model.
        on_disk: those of some entries, by key, that have to be read from the disk.
    """

    def __init__(self, costs: Costs | None = None, num_layers: int = 1,
                 on_disk: Callable[[Collection[str]], set[str]] = lambda keys: set()) -> None:
        self.costs = costs
        self._num_layers = num_layers
        self._on_disk = on_disk

    def decide(self, plan: Plan, cached: int = 0, read: int = 0) -> Decision:
        """What becomes of a request.  Who asks for all rows (`policy="full"`) gets them.

        Args:
            cached: leading tokens that vLLM's prefix cache holds.
            read: those of them that the pass reads there; what is neither read nor stored is computed again.
        """
        if plan.policy.recomputes_all:
            return Decision(True)
        if self.costs is None:
            return Decision(_fewer_rows(plan, cached, read))
        prefill_s = self.costs.prefill(max(1, plan.stats.prompt_tokens - cached), cached)
        keys = {placement.key for placement in plan.placements}
        blend_s = self.costs.blend(work_of(plan, self._num_layers, self._on_disk(keys), read))
        quicker = _fewer_rows(plan, cached, read) if plan.always else blend_s < self.costs.margin * prefill_s
        return Decision(quicker, prefill_s, blend_s)


    def reads(self, plan: Plan, cached: int) -> bool:
        """Whether a pass is quicker where it reads cached tokens than where it blends them anew."""
        if self.costs is None:
            return _rows(plan, cached) < _rows(plan, 0)
        return self.decide(plan, cached, cached).blend_s < self.decide(plan, cached).blend_s


def work_of(plan: Plan, num_layers: int, on_disk: Collection[str] = (), read: int = 0) -> PassWork:
    """What blending a request takes as it is planned.

    Args:
        on_disk: keys of entries that have to be read from the disk.
        read: leading tokens that the pass reads from vLLM's paged cache.
    """
    tokens, placements = plan.stats.prompt_tokens, _behind(plan, read)
    lengths = [_length(placement) for placement in placements if not placement.exact]
    approximate = sum(lengths)
    recomputed = plan.policy.recomputed(lengths, num_layers) if lengths else 0
    share = recomputed / approximate if approximate else 0.0
    spared = sum((1.0 if placement.exact else 1 - share) * _pairs(placement.start, placement.end)
                 for placement in placements)
    drifts = isinstance(plan.policy, Selective) and plan.policy.reach > 0 and recomputed > 0
    return PassWork(
        tokens=tokens, fresh=tokens - read - sum(map(_length, placements)), recomputed=recomputed,
        moved=approximate if drifts else 0, placements=len(placements), pairs=_pairs(read, tokens) - spared,
        scoring=_scoring(plan, placements, num_layers, read) if lengths else (),
        on_disk=sum(_length(placement) for placement in placements if placement.key in on_disk))


def _scoring(plan: Plan, placements: Sequence[Placement], num_layers: int, read: int) -> tuple[Scoring, ...]:
    tokens, passes = plan.stats.prompt_tokens, []
    approximate = sum(_length(placement) for placement in placements if not placement.exact)
    left = float(tokens - read)
    for step, evidence in enumerate(plan.policy.evidence(num_layers)):
        if isinstance(evidence, Attention):
            asking = max(1, tokens - plan.question_start)
            rows = asking + (0 if read else min(placements[0].start, _LEAD))
            weighed = asking * tokens * len(evidence.layers) / num_layers
            passes.append(Scoring(rows, (evidence.layers[-1] + 1) / num_layers, weighed))
        else:
            passes.append(Scoring(round(left), (evidence.layer + 1) / num_layers))
            left = min(left, tokens - read - (1 - plan.policy.share_left(step)) * approximate)
    return tuple(passes)


def _fewer_rows(plan: Plan, cached: int, read: int) -> bool:
    """Whether a pass has fewer rows to compute than vLLM."""
    tokens = plan.stats.prompt_tokens
    reading = tokens // _READ_SHARE if cached else 0
    return _rows(plan, read) + reading < tokens - cached


def _rows(plan: Plan, read: int) -> float:
    """Rows of a pass."""
    placements = _behind(plan, read)
    approximate = sum(_length(placement) for placement in placements if not placement.exact)
    return plan.stats.prompt_tokens - read - sum(map(_length, placements)) + _USUAL_RATIO * approximate


def _behind(plan: Plan, read: int) -> list[Placement]:
    """What of the placements stands behind the first `read` tokens."""
    return [replace(placement, start=max(read, placement.start)) for placement in plan.placements
            if placement.end > read]


def _length(placement: Placement) -> int:
    return placement.end - placement.start


def _pairs(start: int, end: int) -> float:
    """Pairs of a row and a token that it sees, of the rows from `start` on."""
    return (end - start) * (start + end) / 2
