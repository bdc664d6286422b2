"""What the scheduler side and the worker side of the connector tell each other, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from blendrag.policies import Policy
from blendrag.runtime.costs import Costs
from blendrag.stats import BlendMap


@dataclass(frozen=True)
class Placement:
    """A stored entry and the prompt positions `[start, end)` it stands in for.

    `exact` where the entry was encoded behind the very tokens that precede it here.  `offset` is the entry's token
    that stands at `start`: where the tokenizer merged a chunk's edge with its neighbour, the edge is left out.
    """

    start: int
    end: int
    key: str
    exact: bool
    offset: int = 0


@dataclass
class BlendJob:
    """One request's share of a blend pass.

    Attributes:
        token_ids: the prompt without its last token, which vLLM computes itself; int64.
        placements: stored entries, in prompt order, not overlapping.
        question_start: first of the tokens whose attention a query-aware policy measures.
        policy: chooses what is computed again.
        write_from: tokens before it are in the paged cache already, shared with other requests.
        read: tokens before it are read from there; no more than `write_from`.
        block_ids: the request's blocks in the paged cache, per KV cache group.
        resumed: vLLM had preempted the request, and it is blended again.
        explain: report token by token.
        fingerprint: what the placements' entries are named after.  A worker that has another one by now uses none.
    """

    request_id: str
    token_ids: npt.NDArray[np.int64]
    placements: list[Placement]
    question_start: int
    policy: Policy
    write_from: int
    block_ids: tuple[list[int], ...]
    read: int = 0
    resumed: bool = False
    explain: bool = False
    fingerprint: str = ""


@dataclass
class BlendReport:
    """What a blend pass did for one request; counts are tokens, `row_layers` is rows x layers computed.

    `cached` tokens were read from vLLM's paged cache; they are not among the `reused` ones, which come from the store.

    `damaged` names entries that were planned with and could not be had when they were needed.  After a `failure` the
    request was computed in full; `unwritten` are the blocks of one for which that failed too.  `resumed` is the job's.
    `map` is there where the job asks for it.  `outdated`: the job's entries belong to weights that the model no longer
    has, or to the time before a reset.
    """

    row_layers: int = 0
    cached: int = 0
    reused: int = 0
    recomputed: int = 0
    damaged: list[str] = field(default_factory=list)
    load_s: float = 0.0
    score_s: float = 0.0
    blend_s: float = 0.0
    failure: str = ""
    unwritten: list[int] = field(default_factory=list)
    resumed: bool = False
    map: BlendMap | None = None
    outdated: bool = False


@dataclass(frozen=True, eq=False)
class Audit:
    """A request of which the first token's distribution is to be compared: blended, and in full.

    Attributes:
        asked: the policy that the request asked for.
        policies: those to compare.
        token_ids: the whole prompt; int64.
        placements, question_start, fingerprint: see `BlendJob`.
    """

    asked: Policy
    policies: list[Policy]
    token_ids: npt.NDArray[np.int64]
    placements: list[Placement]
    question_start: int
    fingerprint: str = ""


@dataclass(frozen=True)
class AuditResult:
    """What an audit found, for each of its policies; nothing where an entry was gone, or on ranks without logits.

    Attributes:
        kl: KL(full || blended) in nats, over the whole vocabulary.
        same: both have the same likeliest token.
        failure: why there is no result.
    """

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True)
class Missing:
    """A chunk, or the prefix of a prompt, that is not stored; as token ids.  `scope`: where it will be."""

    ids: list[int]
    is_prefix: bool
    scope: str


@dataclass
class EncodeReport:
    """What a step did for `BlendMetadata.encode`, these and earlier ones.

    Attributes:
        done: chunks since the engine started that are done with, stored or not; they end in order.
        rows: rows computed in this step.
        seconds: what that took.
    """

    done: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """Scheduler to worker: what requests wait for, and what nobody waits for.

    Attributes:
        jobs: to begin with from this step on.
        pass_rows: of them and of earlier ones, rows to compute in this step.
        encode: chunks to encode from this step on, behind the attention sink `sink_ids`.
        encode_rows: of them and of earlier ones, rows to compute in this step at most.
        audits: requests to check from this step on.
        audit_rows: of them and of earlier ones, rows to compute in this step, and what is left of a forward.
        quality: what the quality guard knows (`Quality` as mappings), where that has changed.
        generation: `Fingerprint.generation`.
        idle: vLLM computes nothing in this step, and nothing is encoded or audited: it may wait for entries.
    """

    jobs: list[BlendJob] = field(default_factory=list)
    pass_rows: int = 0
    encode: list[Missing] = field(default_factory=list)
    encode_rows: int = 0
    sink_ids: list[int] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    audit_rows: int = 0
    quality: list[dict[str, Any]] | None = None
    generation: str = ""
    idle: bool = False


@dataclass
class BlendReports(KVConnectorWorkerMetadata):
    """Worker to scheduler: reports by request id, results of audits in their order, and what was encoded, where a
    step was asked for it.  `model`: `Fingerprint.model`, where that has changed."""

    reports: dict[str, BlendReport] = field(default_factory=dict)
    encoded: EncodeReport | None = None
    audits: list[AuditResult] = field(default_factory=list)
    model: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BlendReports:
        """All ranks pick the same rows, so the first rank's report stands; a failure anywhere counts."""
        assert isinstance(other, BlendReports)
        for request_id, report in other.reports.items():
            mine = self.reports.setdefault(request_id, report)
            mine.failure = mine.failure or report.failure
            mine.unwritten = mine.unwritten or report.unwritten
        self.audits = [max(pair, key=lambda result: (bool(result.failure), len(result.kl)))
                       for pair in zip(self.audits, other.audits, strict=True)]
        if self.encoded is not None and other.encoded is not None:
            # Every rank computes the same rows, and writes its share of an entry in its own time.
            self.encoded.done = min(self.encoded.done, other.encoded.done)
        return self  # all ranks have the same fingerprint


@dataclass
class ModelFacts(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start-up.

    Attributes:
        fingerprint: identifies the model that KV belongs to; see `blendrag.runtime.model.identity`.
        num_layers: attention layers.
        ranks: tensor-parallel ranks, each of which keeps its own heads.
        reads_cache: passes can read what vLLM's prefix cache holds of a prompt.
        costs: what prefills take on this machine; None where that was not measured.
    """

    fingerprint: str
    num_layers: int
    ranks: int = 1
    reads_cache: bool = False
    costs: Costs | None = None
