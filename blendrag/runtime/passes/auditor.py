"""How far blended first tokens are from a full prefill's: what `blendrag.guard` goes by."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch

from blendrag.runtime.messages import Audit, AuditResult, BlendJob
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.forward import Passes, Tile, rows_of
from blendrag.runtime.passes.lanes import FirstTokenLane

logger = logging.getLogger(__name__)


class Auditor:
    """Computes prompts twice, blended and in full, forward by forward in steps of the engine.

    Nothing of it gets into the paged cache or the store.
    """

    def __init__(self, blender: Blender) -> None:
        self._blender = blender
        self._forward = blender.forward
        self._audits: deque[Passes[AuditResult]] = deque()
        self._tile: Tile | None = None

    def advance(self, audits: Sequence[Audit], rows: int) -> list[AuditResult]:
        """Takes more audits, and goes on with what there is until so many rows are computed.

        Returns:
            The results of those that ended, in their order.  No request waits for one: a failure is a result.
        """
        self._audits.extend(map(self._audit, audits))
        results: list[AuditResult] = []
        while rows > 0 and self._audits:
            try:
                if self._tile is None:
                    self._tile = next(self._audits[0])
                tile = self._tile
                rows -= rows_of(tile)
                self._tile = self._audits[0].send(self._forward.timed_tile(tile))
                continue
            except StopIteration as end:
                results.append(end.value)
            except Exception as error:
                logger.debug("an audit failed", exc_info=True)
                results.append(AuditResult(failure=f"{type(error).__name__}: {error}"))
                if self._blender.model.device.type == "cuda":
                    torch.cuda.empty_cache()
            self._tile = None
            self._audits.popleft()
        return results

    def _audit(self, audit: Audit) -> Passes[AuditResult]:
        fingerprint = self._blender.entries.fingerprint
        if audit.fingerprint != fingerprint:
            return AuditResult()  # the request was computed by other weights, or before a reset
        ids = torch.from_numpy(audit.token_ids).to(self._blender.model.device)
        before, last = ids[:-1], ids[-1:]
        plain = Context(self._blender.model, len(before), ())
        full = FirstTokenLane(plain, before, torch.ones_like(plain.stored), last)
        yield from self._forward.passes(full)
        hidden = [full.hidden]
        for policy in audit.policies:
            work = yield from self._blender.prepare(
                BlendJob("audit", audit.token_ids[:-1], audit.placements, audit.question_start, policy, write_from=0,
                         block_ids=()))
            if work.report.damaged:
                return AuditResult()  # this is no longer what the request got
            rows = work.rows
            lane = FirstTokenLane(work.context, work.ids, rows, last, work.sparsity, work.dense_layers,
                                  work.drift(rows))
            yield from self._forward.passes(lane)
            hidden.append(lane.hidden)
        if fingerprint != self._blender.entries.fingerprint:
            return AuditResult()
        expected, *blended = map(self._logits, hidden)
        if expected is None:
            return AuditResult()
        pairs = [divergence(expected, logits) for logits in blended if logits is not None]
        return AuditResult([kl for kl, _ in pairs], [same for _, same in pairs])

    def _logits(self, hidden: torch.Tensor | None) -> torch.Tensor | None:
        assert hidden is not None, "a pass has run to its end"
        return self._forward.logits(hidden)


def divergence(full: torch.Tensor, other: torch.Tensor) -> tuple[float, bool]:
    """KL(full || other) in nats, and whether both have the same likeliest token; of logits, float64 [vocabulary].

    Where others are not numbers the divergence is none either.
    """
    if full.isnan().any():
        raise ArithmeticError("the full prefill's logits are not numbers")
    logp, logq = full.log_softmax(-1), other.log_softmax(-1)
    p = logp.exp()
    gaps = (p * (logp - logq)).where(p > 0, 0)  # a token that is ruled out counts nothing
    return float(gaps.sum().clamp_min(0)), bool(full.argmax() == other.argmax())
