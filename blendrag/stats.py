"""What blendrag says it did: per request on the output, and in total on the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

PREFIX_CACHED = "prefix cached"
NOT_WORTH = "not worth a pass"
OUTDATED = "outdated"


@dataclass
class ChunkStats:
    """One chunk of a prompt.

    Attributes:
        start: its first token's position in the prompt; -1 for a document that is not in it.
        tokens: its length in tokens.
        reused: stored KV was used for it.
        exact: the stored KV was encoded behind exactly the tokens that precede it here.
        reason: why it was not reused: "not stored", "too short", "damaged", "prefix cached", "not worth a pass" (a
            full prefill was estimated to be as quick), "approximate" (and the policy is exact), "pass failed",
            "outdated" (the weights changed or the caches were reset since the request came), "not in the prompt" (a
            document of which only the text was given), "LoRA request", "multimodal request", "prompt embeddings",
            "prompt logprobs asked for" or "blending off" (by the quality guard); empty where it was.
    """

    start: int
    tokens: int
    reused: bool = False
    exact: bool = False
    reason: str = ""


@dataclass
class BlendMap:
    """Each token of a prompt: what its policy measured there, and what became of it.

    Attributes:
        scores: what the policy's first scoring pass measured (see `blendrag.policies.Evidence`); None where it measured
            nothing: outside of the chunks whose stored KV is approximate, or for a policy that needs no evidence.
        stored: the token's KV was stored.
        computed: the blend pass, or vLLM, computed it.  Of a stored chunk, these are the recomputed tokens.
    """

    scores: list[float | None]
    stored: list[bool]
    computed: list[bool]


@dataclass
class BlendStats:
    """One request.  Seconds are wall-clock; `rows` is recomputed rows / (layers x prompt tokens), all passes counted.

    Attributes:
        policy: name of the policy, or "plain" where the request was prefilled in full.
        prompt_tokens: length of the prompt.
        prefix_cached_tokens: leading tokens that vLLM's own prefix cache held.
        chunks: each chunk the prompt marks, in order.
        reused_tokens: tokens whose stored KV was used as it is.
        recomputed_tokens: tokens of stored chunks that were computed again.
        rows: share of a full prefill's rows that was computed; 1.0 = a full prefill.
        load_s: waiting for stored KV, and fetching it from the host tiers.
        score_s: the scoring pass, where the policy needs one.
        blend_s: the blend pass.
        first_token_s: from submission to the first token.
        continued: the prompt begins as an earlier one, whose blended blocks vLLM's prefix cache holds.
        estimated_blend_s, estimated_prefill_s: what a blend pass and a full prefill were estimated to take up to the
            first token; 0.0: not estimated.
        calibrated: the policy is that of the model's profile (`blendrag calibrate`).
        guard: what the quality guard changed: "ratio raised" or "blending off"; empty where it changed nothing.
        ignored: what of the request's wishes was not followed, and why; empty where all was.
        failure: why the blend pass failed and the request was prefilled in full; empty where it did not.
        map: token by token, of a request that asked for it (`explain`) and that a blend pass ran for.
    """

    policy: str = "plain"
    prompt_tokens: int = 0
    prefix_cached_tokens: int = 0
    chunks: list[ChunkStats] = field(default_factory=list)
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    rows: float = 1.0
    load_s: float = 0.0
    score_s: float = 0.0
    blend_s: float = 0.0
    first_token_s: float = 0.0
    continued: bool = False
    estimated_blend_s: float = 0.0
    estimated_prefill_s: float = 0.0
    calibrated: bool = False
    guard: str = ""
    ignored: str = ""
    failure: str = ""
    map: BlendMap | None = None

    @property
    def chunks_found(self) -> int:
        """Chunks that the prompt marks."""
        return len(self.chunks)

    @property
    def chunks_reused(self) -> int:
        """Chunks whose stored KV was used."""
        return sum(chunk.reused for chunk in self.chunks)

    @property
    def chunks_missed(self) -> int:
        """Chunks that were computed; each one's `reason` says why."""
        return self.chunks_found - self.chunks_reused - self.chunks_prefix_cached

    @property
    def chunks_prefix_cached(self) -> int:
        """Chunks that vLLM's own prefix cache held, exact or from this prompt's last time; nothing was loaded or
        computed for them."""
        return sum(chunk.reason == PREFIX_CACHED for chunk in self.chunks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for frameworks' metadata."""
        told = asdict(self)
        if self.map is None:
            del told["map"]
        return told | {"chunks_found": self.chunks_found, "chunks_reused": self.chunks_reused,
                       "chunks_missed": self.chunks_missed, "chunks_prefix_cached": self.chunks_prefix_cached}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BlendStats:
        """The inverse of `to_dict`; unknown keys are ignored."""
        known = {f.name for f in fields(cls)} - {"chunks", "map"}
        return cls(chunks=[ChunkStats(**chunk) for chunk in values.get("chunks", [])],
                   map=BlendMap(**values["map"]) if values.get("map") else None,
                   **{key: value for key, value in values.items() if key in known})


@dataclass
class EngineStats:
    """Totals since the engine started.

    Attributes:
        requests: finished requests.
        blended: finished requests that reused at least one chunk.
        failures: blend passes that failed and were replaced by a full prefill.
        prompt_tokens, reused_tokens, recomputed_tokens: sums over finished requests.
        chunks_reused: chunks whose stored KV was used.
        chunks_prefix_cached: chunks that vLLM's own prefix cache held, which is better still.
        missed: chunks that were computed, by reason.
        encoded_chunks, encoded_tokens: chunks computed for the store.
    """

    requests: int = 0
    blended: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    chunks_reused: int = 0
    chunks_prefix_cached: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    encoded_chunks: int = 0
    encoded_tokens: int = 0

    def add(self, request: BlendStats) -> None:
        """Counts a finished request."""
        self.requests += 1
        self.blended += request.chunks_reused > 0
        self.failures += bool(request.failure)
        self.prompt_tokens += request.prompt_tokens
        self.reused_tokens += request.reused_tokens
        self.recomputed_tokens += request.recomputed_tokens
        self.chunks_reused += request.chunks_reused
        self.chunks_prefix_cached += request.chunks_prefix_cached
        self.missed.update(c.reason for c in request.chunks if not c.reused and c.reason != PREFIX_CACHED)
