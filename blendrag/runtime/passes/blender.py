"""The worker side's work for requests: score, select, blend."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from blendrag.errors import ConfigError
from blendrag.policies import Attention, Evidence, Layout, Policy, Selective
from blendrag.runtime.compat import FAILURES_NAME_REQUESTS
from blendrag.runtime.messages import BlendJob, BlendReport, Placement
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.drift import Drift
from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.forward import Forward, Passes
from blendrag.runtime.passes.lanes import AttentionLane, BlendLane, DeviationLane
from blendrag.runtime.passes.paged_reader import CachedPrefix, PagedReader
from blendrag.runtime.passes.sparsity import Sparsity
from blendrag.stats import BlendMap

logger = logging.getLogger(__name__)

_KEEP_BYTES = 4 * 2**30
"""Of rotated keys that stay in host memory from one pass to the next."""


@dataclass
class Work:
    """A job while it is worked on.

    Attributes:
        ids: the job's `token_ids` on the device.
        chosen: bool [tokens]; the reused tokens that will be computed again, as far as is known.
        needed: bool [tokens]; others that will be.
        sparsity, dense_layers: see `BlendLane`.
        scores: of the first step, where the job wants to know.
    """

    job: BlendJob
    policy: Policy
    report: BlendReport
    context: Context
    ids: torch.Tensor
    layout: Layout
    chosen: torch.Tensor
    needed: torch.Tensor
    sparsity: Sparsity | None = None
    dense_layers: int = 0
    scores: torch.Tensor | None = None

    @property
    def rows(self) -> torch.Tensor:
        """bool [tokens]; what the blend pass computes, once all is chosen."""
        rows = torch.ones_like(self.chosen) if self.policy.recomputes_all else self.needed | self.chosen
        rows[: self.context.cached_tokens] = False
        rows[-1] = True  # a pass needs a row
        return rows

    def drift(self, rows: torch.Tensor) -> Drift | None:
        """How what is not computed moves along with these rows."""
        reach = self.policy.reach if isinstance(self.policy, Selective) else 0
        return Drift(self.layout, rows, reach) if reach else None


class Blender:
    """Blends with the model vLLM loaded.  Runs in the worker, between vLLM's own forwards.

    Args:
        sparse_attention: see `BlendConfig`.
        reader: of vLLM's paged cache; None where it cannot be read.
    """

    def __init__(self, model: BlendModel, forward: Forward, entries: Entries, sparse_attention: int | None = None,
                 reader: PagedReader | None = None) -> None:
        self.model = model
        self.forward = forward
        self.entries = entries
        self.sparse_attention = sparse_attention
        self.reader = reader
        self._ranks = entries.ranks

    def passes(self, job: BlendJob) -> Passes[BlendReport]:
        """The forwards that fill a job's blocks in the paged cache.

        A failure, of a forward too, is contained: the report says why.
        """
        outdated = self._outdated(job)
        if outdated:
            job = replace(job, placements=[])  # all rows are computed
        try:
            report = yield from self._blend(job)
        except Exception as error:
            logger.debug("blend pass failed", exc_info=True)
            report = yield from self._in_full(job, f"{type(error).__name__}: {error}")
        report.resumed, report.outdated = job.resumed, outdated
        return report

    def needs(self, job: BlendJob) -> dict[str, int]:
        """The keys of the entries that a pass of the job reads, and how long each must be."""
        return {} if self._outdated(job) else _lengths(self._placements(job))

    def prepare(self, job: BlendJob) -> Passes[Work]:
        """Loads what a job reuses and chooses its rows: all but the blend pass itself."""
        work = self._load(job)
        if work.layout.chunks:
            steps = self._evidence(work.policy)
            if not steps:
                self._narrow(work, None, 0)
            for step, evidence in enumerate(steps):
                yield from self._score(work, evidence, step)
        return work

    def _blend(self, job: BlendJob) -> Passes[BlendReport]:
        work = yield from self.prepare(job)
        work.report.blend_s = yield from self.forward.passes(self._lane(work))
        return work.report

    def _in_full(self, job: BlendJob, failure: str) -> Passes[BlendReport]:
        """Computes all rows of a request whose pass failed, with nothing from the store.

        vLLM could prefill it, but before 0.32 models with several KV cache groups would end the engine.
        """
        report = BlendReport(failure=failure)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            context = Context(self.model, len(job.token_ids), ())
            yield from self.forward.passes(BlendLane(context, self._tensor(job.token_ids),
                                                     torch.ones_like(context.stored), job.write_from, job.block_ids))
        except Exception as error:
            if len(job.block_ids) > 1 and not FAILURES_NAME_REQUESTS:
                raise  # such a model's requests cannot be given back to vLLM
            logger.debug("full pass failed", exc_info=True)
            block_size = self.model.layers[0].block_size
            report.unwritten = job.block_ids[0][job.write_from // block_size : len(job.token_ids) // block_size + 1]
            report.failure += f", then {type(error).__name__}: {error}"
        return report

    def _load(self, job: BlendJob) -> Work:
        started = time.perf_counter()
        placements, cached = self._placements(job), None
        lengths = _lengths(placements)
        if self.reader is not None and job.read:
            cached = CachedPrefix(self.reader, job.read, job.block_ids)
        entries = dict(zip(lengths, self.entries.load(list(lengths), list(lengths.values())), strict=True))
        present = [(placement, entry) for placement in placements if (entry := entries[placement.key]) is not None]
        report = BlendReport(damaged=[p.key for p in placements if entries[p.key] is None])
        again = bool(self._evidence(job.policy)) and self.model.device.type == "cpu"
        context = Context(self.model, len(job.token_ids), present, _KEEP_BYTES if again else 0, self.entries.tier,
                          cached)
        layout = _layout(context)
        report.load_s = time.perf_counter() - started
        return Work(job, job.policy, report, context, self._tensor(job.token_ids), layout, layout.reused.clone(),
                    ~context.stored)

    def _outdated(self, job: BlendJob) -> bool:
        return job.fingerprint != self.entries.fingerprint

    def _placements(self, job: BlendJob) -> Sequence[Placement]:
        """The entries that stand behind what is read from the paged cache."""
        return _behind(job.read, job.placements) if self.reader is not None and job.read else job.placements

    def _score(self, work: Work, evidence: Evidence, step: int) -> Passes[None]:
        """One scoring pass, and what the policy makes of it."""
        lane = self._evidence_lane(work, evidence, step)
        work.report.score_s += yield from self.forward.passes(lane)
        if step == 0 and self.sparse_attention is not None:
            scores = lane.scores.where(work.context.stored, 0)
            work.sparsity = Sparsity.choose(work.layout, scores, self.sparse_attention)
        if step == 0 and work.job.explain:
            work.scores = lane.scores
        self._narrow(work, lane.scores, step)
        if isinstance(lane, AttentionLane):
            work.needed[lane.positions] = True  # their KV in the context is the scoring pass's: compute it anew
        else:
            work.dense_layers = lane.depth - 1  # what these layers retain was computed with dense attention
        work.report.row_layers += len(lane.positions) * lane.depth

    def _narrow(self, work: Work, scores: torch.Tensor | None, step: int) -> None:
        """Leaves those of the chosen tokens that the policy still wants; it never gets one back."""
        if scores is not None:
            scores = scores.masked_fill(~work.chosen, float("-inf"))
        selected = work.policy.select(work.layout, scores, step)
        if selected.dtype != torch.bool or selected.shape != work.chosen.shape:
            raise ConfigError(f"policy '{work.policy.name}' selects with {selected.dtype} {list(selected.shape)}: let "
                              f"`select` return bool [{len(work.chosen)}], a truth value for each token")
        work.chosen = self._ranks.first(work.chosen & selected)

    def _evidence(self, policy: Policy) -> tuple[Evidence, ...]:
        """What a policy wants measured; ConfigError where the model has no such layers."""
        layers = len(self.model.layers)
        steps = policy.evidence(layers)
        if len(steps) > layers:
            raise ConfigError(f"policy '{policy.name}' asks for {len(steps)} scoring passes of a model that has "
                              f"{layers} layers: name fewer check layers")
        measured = [step.layers if isinstance(step, Attention) else (step.layer,) for step in steps]
        if not all(numbers and list(numbers) == sorted(set(numbers).intersection(range(layers)))
                   for numbers in measured):
            raise ConfigError(f"policy '{policy.name}' asks for evidence in layers {measured}: name layers from 0 to "
                              f"{layers - 1}, ascending")
        return steps

    def _evidence_lane(self, work: Work, evidence: Evidence, step: int) -> AttentionLane | DeviationLane:
        if isinstance(evidence, Attention):
            question_start = min(work.job.question_start, len(work.ids) - 1)
            return AttentionLane(work.context, work.ids, question_start, evidence, self._ranks)
        rows = work.needed | work.chosen if step else torch.ones_like(work.chosen)
        return DeviationLane(work.context, work.ids, rows, evidence, self._ranks)

    def _lane(self, work: Work) -> BlendLane:
        stored, rows = work.context.stored, work.rows
        count = int(rows.sum())
        work.report.recomputed = int((rows & stored).sum())
        work.report.cached = work.context.cached_tokens
        work.report.reused = int(stored.sum()) - work.report.cached - work.report.recomputed
        work.report.row_layers += count * len(self.model.layers)
        if work.job.explain:
            work.report.map = _map(work, rows)
        return BlendLane(work.context, work.ids, rows, work.job.write_from, work.job.block_ids, work.sparsity,
                         work.dense_layers, work.drift(rows))

    def _tensor(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(ids).to(self.model.device)


def _behind(start: int, placements: Sequence[Placement]) -> list[Placement]:
    """What of the placements stands behind the first `start` tokens."""
    return [placement if placement.start >= start else replace(
                placement, start=start, offset=placement.offset + start - placement.start)
            for placement in placements if placement.end > start]


def _lengths(placements: Sequence[Placement]) -> dict[str, int]:
    """How long each of the entries must be at least, by key."""
    lengths: dict[str, int] = {}
    for placement in placements:
        end = placement.offset + placement.end - placement.start
        lengths[placement.key] = max(end, lengths.get(placement.key, 0))
    return lengths


def _map(work: Work, rows: torch.Tensor) -> BlendMap:
    """What a pass knows of each token of a prompt, the last one included, which vLLM computes."""
    scores: list[float | None] = [None] * len(rows)
    if work.scores is not None:
        measured = zip(work.scores.tolist(), work.layout.reused.tolist(), strict=True)
        scores = [score if reused else None for score, reused in measured]
    return BlendMap([*scores, None], [*work.context.stored.tolist(), False], [*rows.tolist(), True])


def _layout(context: Context) -> Layout:
    """Where the approximate entries of a context stand."""
    chunks = tuple((placement.start, placement.end) for placement, _ in context.entries if not placement.exact)
    reused = torch.zeros_like(context.stored)
    for start, end in chunks:
        reused[start:end] = True
    return Layout(reused, chunks)
