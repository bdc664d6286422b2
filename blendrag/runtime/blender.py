"""The worker half's work: score, select and blend for requests, encode for the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blendrag.config import BlendConfig
from blendrag.errors import StoreError
from blendrag.policies import Attention, Deviation, Full, Layout, Policy, make_policy
from blendrag.runtime.context import Context
from blendrag.runtime.forward import Forward
from blendrag.runtime.lanes import AttentionLane, BlendLane, DeviationLane, EncodeLane
from blendrag.runtime.messages import BlendJob, BlendReport, ModelFacts, Placement
from blendrag.runtime.model import BlendModel
from blendrag.store import ChunkStore, KVEntry, entry_key, prefix_digest
from blendrag.store.keys import NEUTRAL

logger = logging.getLogger(__name__)

_KEEP_BYTES = 4 * 2**30


@dataclass
class _Work:
    """A job while it is worked on."""

    job: BlendJob
    policy: Policy
    report: BlendReport
    context: Context
    ids: torch.Tensor
    scores: torch.Tensor | None = None
    needed: torch.Tensor | None = None


class Blender:
    """Blends and encodes with the model vLLM loaded.  Runs in the worker, between vLLM's own forwards."""

    def __init__(self, model: BlendModel, store: ChunkStore, config: BlendConfig) -> None:
        self.model = model
        self.store = store
        self.config = config
        self.forward = Forward(model)
        self.facts = ModelFacts(model.fingerprint, len(model.layers))

    def blend(self, jobs: Sequence[BlendJob]) -> list[BlendReport]:
        """Fills the jobs' blocks in the paged cache, the rows of all jobs together in one forward.

        A failure is contained: jobs that fail together are tried one by one, and the report of one
        that fails alone says why.
        """
        try:
            return self._blend(jobs)
        except Exception as error:
            if len(jobs) > 1:
                logger.warning("a joint blend pass failed (%s), trying its %d requests one by one", error, len(jobs))
                return [report for job in jobs for report in self.blend([job])]
            logger.debug("blend pass failed", exc_info=True)
            return [BlendReport(failure=f"{type(error).__name__}: {error}")]

    def unwritten_blocks(self, job: BlendJob) -> set[int]:
        """The blocks that a failed job left without KV."""
        block_size = self.model.layers[0].block_size
        return set(job.block_ids[0][job.write_from // block_size : len(job.token_ids) // block_size + 1])

    def encode(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
               neutral: bool) -> list[tuple[str, bool]]:
        """Computes chunks behind a prefix, each on its own, and stores what is not stored yet.

        Args:
            chunks: token ids of each chunk.
            prefix_ids: tokens before each chunk; stored too, as the exact entry of that prefix.
            neutral: the prefix only gives the attention a place to sink; file the chunks as the
                variant that serves any prompt.

        Returns:
            `(key, newly computed)` of each chunk.
        """
        keys = self._keys(chunks, prefix_ids, neutral)
        present = self.store.present(keys)
        missing = {key: ids for key, ids in zip(keys, chunks, strict=True) if key not in present}
        if missing:
            prefix = self._prefix(prefix_ids)
            lanes = {key: EncodeLane(prefix, self._tensor(ids)) for key, ids in missing.items()}
            self.forward.run(list(lanes.values()))
            digest = _variant(prefix_ids, neutral)
            for key, lane in lanes.items():
                self._put(key, lane.entry(), prefix=digest, ids=missing[key])
        return [(key, key in missing) for key in keys]

    def stored(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> list[bool]:
        """Which chunks `encode` would find stored."""
        keys = self._keys(chunks, prefix_ids, neutral)
        present = self.store.present(keys)
        return [key in present for key in keys]

    def _keys(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> list[str]:
        digest = _variant(prefix_ids, neutral)
        return [self._key(digest, ids) for ids in chunks]

    def _blend(self, jobs: Sequence[BlendJob]) -> list[BlendReport]:
        keep_bytes = self._spare_bytes() // len(jobs)
        works = [self._load(job, keep_bytes) for job in jobs]
        self._score(works)
        started = time.perf_counter()
        lanes = [self._lane(work) for work in works]
        self.forward.run(lanes)
        self._synchronize()
        seconds = time.perf_counter() - started
        for work in works:
            work.report.blend_s = seconds
        return [work.report for work in works]

    def _load(self, job: BlendJob, keep_bytes: int) -> _Work:
        started = time.perf_counter()
        report = BlendReport()
        entries: list[tuple[Placement, KVEntry]] = []
        for placement in job.placements:
            entry = self._get(placement.key)
            if entry is None:
                report.damaged.append(placement.key)
            else:
                entries.append((placement, entry))
        policy = make_policy(job.policy)
        useful = policy.evidence(len(self.model.layers)) is not None or self.model.device.type == "cuda"
        context = Context(self.model, len(job.token_ids), entries, keep_bytes if useful else 0)
        report.load_s = time.perf_counter() - started
        return _Work(job, policy, report, context, self._tensor(job.token_ids))

    def _score(self, works: Sequence[_Work]) -> None:
        """Runs the scoring passes, requests that need the same evidence together."""
        groups: dict[Attention | Deviation, list[_Work]] = {}
        for work in works:
            evidence = work.policy.evidence(len(self.model.layers))
            if evidence is not None and any(not p.exact for p, _ in work.context.entries):
                groups.setdefault(evidence, []).append(work)
        for evidence, members in groups.items():
            started = time.perf_counter()
            lanes: list[AttentionLane | DeviationLane] = [
                AttentionLane(work.context, work.ids, min(work.job.question_start, len(work.ids) - 1), evidence)
                if isinstance(evidence, Attention) else DeviationLane(work.context, work.ids, evidence)
                for work in members]
            self.forward.run(lanes)
            self._synchronize()
            seconds = time.perf_counter() - started
            for work, lane in zip(members, lanes, strict=True):
                work.scores = lane.scores
                if isinstance(lane, AttentionLane):
                    work.needed = lane.positions  # their KV in the context is the scoring pass's: compute it anew
                work.report.score_s = seconds
                work.report.row_layers += len(lane.positions) * lane.depth

    def _lane(self, work: _Work) -> BlendLane:
        stored = work.context.stored
        reused = torch.zeros_like(stored)
        chunks = [(p.start, p.end) for p, _ in work.context.entries if not p.exact]
        for start, end in chunks:
            reused[start:end] = True
        if isinstance(work.policy, Full):
            rows = torch.ones_like(stored)
        else:
            chosen = work.policy.select(Layout(reused, tuple(chunks)), work.scores) if chunks else reused
            rows = ~stored | (chosen & reused)
        if work.needed is not None:
            rows[work.needed] = True
        rows[-1] = True  # a pass needs a row
        count = int(rows.sum())
        work.report.recomputed = int((rows & stored).sum())
        work.report.reused = int(stored.sum()) - work.report.recomputed
        work.report.row_layers += count * len(self.model.layers)
        return BlendLane(work.context, work.ids, rows, work.job.write_from, work.job.block_ids)

    def _prefix(self, ids: Sequence[int]) -> Context:
        """The context of a prefix, computed and stored where it is not stored yet."""
        if not ids:
            return Context(self.model, 0, ())
        key = self._key(prefix_digest(()), ids)
        entry = self._get(key)
        if entry is None:
            lane = EncodeLane(Context(self.model, 0, ()), self._tensor(ids))
            self.forward.run([lane])
            entry = lane.entry()
            self._put(key, entry)  # without ids: a system prompt shall not be found in the middle of another prompt
        return Context(self.model, len(ids), [(Placement(0, len(ids), key, exact=True), entry)])

    def _key(self, digest: bytes, ids: Sequence[int]) -> str:
        return entry_key(self.model.fingerprint, self.config.namespace, digest, ids)

    def _get(self, key: str) -> KVEntry | None:
        try:
            return self.store.get(key)
        except StoreError as error:
            logger.warning("a stored chunk cannot be read, computing it: %s", error)
            return None

    def _put(self, key: str, entry: KVEntry, prefix: bytes | None = None, ids: Sequence[int] | None = None) -> None:
        self.store.put(key, entry, fingerprint=self.model.fingerprint, namespace=self.config.namespace,
                       prefix=prefix, ids=ids)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.model.device)

    def _spare_bytes(self) -> int:
        """Memory that the contexts of a step may fill."""
        if self.model.device.type != "cuda":
            return _KEEP_BYTES
        free, _ = torch.cuda.mem_get_info()
        return min(_KEEP_BYTES, free // 2)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def _variant(prefix_ids: Sequence[int], neutral: bool) -> bytes:
    """The digest of what chunks are encoded behind."""
    return NEUTRAL if neutral else prefix_digest(prefix_ids)
