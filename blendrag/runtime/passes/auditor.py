"""How far blended first tokens are from a full prefill's: what `blendrag.guard` goes by."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence

import torch

from blendrag.runtime.messages import Audit, AuditResult, BlendJob
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.lanes import FirstTokenLane

logger = logging.getLogger(__name__)


class Auditor:
    """Computes prompts twice, blended and in full.  Nothing of it gets into the paged cache or the store.

    A full prefill is spread over steps of the engine, forward by forward.  Blended passes run in one step, as the
    request's own did.
    """

    def __init__(self, blender: Blender) -> None:
        self._blender = blender
        self._forward = blender.forward
        self._audits: deque[Generator[int, None, AuditResult]] = deque()

    def advance(self, audits: Sequence[Audit], rows: int) -> list[AuditResult]:
        """Takes more audits, and goes on with what there is until so many rows are computed.

        Returns:
            The results of those that ended, in their order.  No request waits for one: a failure is a result.
        """
        self._audits.extend(map(self._audit, audits))
        results: list[AuditResult] = []
        while rows > 0 and self._audits:
            try:
                rows -= next(self._audits[0])
                continue
            except StopIteration as end:
                results.append(end.value)
            except Exception as error:
                logger.debug("an audit failed", exc_info=True)
                results.append(AuditResult(failure=f"{type(error).__name__}: {error}"))
                if self._blender.model.device.type == "cuda":
                    torch.cuda.empty_cache()
            self._audits.popleft()
        return results

    def _audit(self, audit: Audit) -> Generator[int, None, AuditResult]:
        """Yields the rows that were computed since last."""
        ids = torch.from_numpy(audit.token_ids).to(self._blender.model.device)
        before, last = ids[:-1], ids[-1:]
        plain = Context(self._blender.model, len(before), ())
        full = FirstTokenLane(plain, before, torch.ones_like(plain.stored), last)
        if audit.fingerprint == self._blender.entries.fingerprint:
            yield from self._forward.steps([full])
        if audit.fingerprint != self._blender.entries.fingerprint:
            return AuditResult()  # the request was computed by other weights, or before a reset
        works = self._blender.prepare([
            BlendJob("audit", audit.token_ids[:-1], audit.placements, audit.question_start, policy, write_from=0,
                     block_ids=())
            for policy in audit.policies])
        if any(work.report.damaged for work in works):
            return AuditResult()  # this is no longer what the request got
        lanes = [full]
        for work in works:
            rows = work.rows
            lanes.append(FirstTokenLane(work.context, work.ids, rows, last, work.sparsity, work.dense_layers,
                                        work.drift(rows)))
        for lane in lanes[1:]:  # each on its own, cut into forwards like the request's pass
            self._forward.run([lane])
        yield sum(len(lane.positions) for lane in lanes[1:])
        expected, *found = map(self._logits, lanes)
        if expected is None:
            return AuditResult()
        pairs = [divergence(expected, logits) for logits in found if logits is not None]
        return AuditResult([kl for kl, _ in pairs], [same for _, same in pairs])

    def _logits(self, lane: FirstTokenLane) -> torch.Tensor | None:
        assert lane.hidden is not None
        return self._forward.logits(lane.hidden)


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
