"""What every engine does with requests: ours become vLLM's, and vLLM's outputs become ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from blendrag.blend_params import BLEND_PARAMS_KEY
from blendrag.config import BlendConfig
from blendrag.errors import ConfigError, PromptError
from blendrag.ordering import ChunkOrder
from blendrag.outputs import BlendOutput, EncodedChunk
from blendrag.policies import Exact, Policy, require_affordable
from blendrag.prompt import BlendPrompt, Chunk
from blendrag.reading import as_prompt
from blendrag.stats import BlendStats, EngineStats
from blendrag.tokens import SegmentTokenizer, TokenizedPrompt

Prompt = str | BlendPrompt
Prefix = str | BlendPrompt
Blend = bool | Literal["always"]
"""False: plain full prefill; True: blended where that is estimated to gain; "always": blended in any case."""
Ratio = float | Sequence[float]
"""Share of the reused tokens to recompute, or one for each of a policy's check layers."""

_ENCODE_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class RequestOptions:
    """How requests are blended, as `BlendEngine.generate` takes it.

    Attributes:
        blend: see `Blend`.
        policy, ratio, policy_settings: override the engine's policy.
        cache_salt: shares stored chunks and vLLM's prefix cache only with what has the same salt.
        lora_request: vLLM's, which names an adapter.
        explain: ask for `BlendStats.map`.
    """

    blend: Blend = True
    policy: str | Policy | None = None
    ratio: Ratio | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    explain: bool = False
    policy_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policy_changes(self) -> dict[str, Any]:
        """What `BlendConfig.make_policy` takes; empty where the engine's policy holds."""
        settings = {"policy": self.policy, "ratio": self.ratio, **self.policy_settings}
        return {name: value for name, value in settings.items() if value is not None}


class Requests:
    """Translates for one running engine.  Safe to call from several threads.

    Args:
        tokens: the model's tokenizer.
        max_model_len: longest prompt plus answer, in tokens.
        stats: where finished requests and encoded chunks are counted.
        num_layers: of the model; None: policies are not checked for what they cost.
        one_process: the engine and its only worker run in this process, so it need not know a policy's class.
    """

    def __init__(self, config: BlendConfig, tokens: SegmentTokenizer, max_model_len: int, stats: EngineStats,
                 num_layers: int | None = None, one_process: bool = False) -> None:
        self.config = config
        self.one_process = one_process
        self.tokens = tokens
        self.max_model_len = max_model_len
        self._stats = stats
        self._num_layers = num_layers
        self._order = ChunkOrder()
        self._lock = threading.Lock()

    def make(self, prompts: Iterable[Prompt], params: Iterable[Any],
             options: RequestOptions) -> list[tuple[dict[str, Any], Any]]:
        """vLLM's prompt and `SamplingParams` for each prompt; the caller's params are left alone.

        Args:
            params: vLLM's `SamplingParams` or None, one for each prompt.

        Raises:
            PromptError: a prompt is empty, longer than the model takes, or marks more chunks than `max_documents`.
            ConfigError: an unknown policy or setting, a policy whose scoring passes cost more than a full prefill, a
                policy class that the engine's processes do not know, or parameters of something else than sampling.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from blendrag.runtime.compat import token_prompt

        policy = self.config.make_policy(**options.policy_changes)
        if self._num_layers is not None:
            require_affordable(policy, self._num_layers)
        override: Policy | dict[str, Any] | None = None
        if options.policy_changes:
            if not self.one_process:
                self.config.check_travels(policy)
            override = policy if self.one_process else policy.settings()
        reorder = bool(options.blend) and isinstance(policy, Exact) and policy.reorder
        made = []
        for prompt, given in zip([self._tokenize(prompt, reorder) for prompt in prompts], params, strict=True):
            if not isinstance(given, (SamplingParams, NoneType)):
                raise ConfigError(f"an engine takes SamplingParams, not {type(given).__name__}: sample, as beam search "
                                  "and pooling are not part of it")
            request = given.clone() if given is not None else SamplingParams()
            request.output_kind = RequestOutputKind.CUMULATIVE
            marks = {"spans": [list(span) for span in prompt.spans], "explain": options.explain,
                     "always": options.blend == "always", "policy": override} if options.blend else False
            transfer = (request.extra_args or {}).get("kv_transfer_params") or {}
            transfer = transfer | {BLEND_PARAMS_KEY: marks}
            request.extra_args = (request.extra_args or {}) | {"kv_transfer_params": transfer}
            made.append((token_prompt(prompt.ids, options.cache_salt), request))
        return made

    def output(self, found: Any, progress: Progress) -> BlendOutput:
        """vLLM's output with its statistics; a finished request is counted."""
        # Of several samples only the first is blended, the others find its blocks in the prefix cache.
        told = max((params[BLEND_PARAMS_KEY] for params in progress.handed_out if BLEND_PARAMS_KEY in params),
                   key=lambda told: int(told["chunks_reused"]), default=None)
        cached = found.num_cached_tokens or 0
        length = len(found.prompt_token_ids or [])
        stats = BlendStats.from_dict(told) if told else BlendStats(
            prompt_tokens=length, prefix_cached_tokens=cached, rows=1 - cached / max(1, length))
        stats.first_token_s = progress.first_token_s
        if found.finished:
            with self._lock:
                self._stats.add(stats)
        return BlendOutput(found, stats)

    def chunk_ids(self, chunks: Iterable[str | Chunk]) -> list[list[int]]:
        """Ids of each chunk."""
        return [self.tokens.chunk_ids(chunk.text if isinstance(chunk, Chunk) else chunk) for chunk in chunks]

    def behind(self, prefix: Prefix) -> tuple[list[int], bool]:
        """Ids to encode behind, and whether they are only the neutral variant's sink."""
        if prefix if isinstance(prefix, str) else prefix.prefix:
            return self.tokens.prefix_ids(prefix), False
        return list(self.tokens.sink_ids), True

    def naming(self, chunks: Iterable[str | Chunk], prefix: Prefix, cache_salt: str | None) -> tuple[Any, ...]:
        """What names the entries of chunks: scope, ids of each, ids before them, whether those are only a sink."""
        return self._scope(cache_salt), self.chunk_ids(chunks), *self.behind(prefix)

    def encoding(self, chunks: Sequence[str | Chunk], prefix: Prefix,
                 on_progress: Callable[[int, int], None] | None, cache_salt: str | None = None) -> Encoding:
        """What storing these chunks takes; PromptError where prefix and chunk are longer than the model takes."""
        scope, ids, prefix_ids, neutral = self.naming(chunks, prefix, cache_salt)
        for number, chunk in enumerate(ids):
            if len(prefix_ids) + len(chunk) > self.max_model_len:
                raise PromptError(f"chunk {number} has {len(chunk)} tokens, the model takes {self.max_model_len} with "
                                  "the prefix: split it, or raise max_model_len")
        return Encoding(self, scope, ids, (prefix_ids, neutral), on_progress)

    def count_encoded(self, tokens: int) -> None:
        """Counts a chunk that was computed for the store."""
        with self._lock:
            self._stats.encoded_chunks += 1
            self._stats.encoded_tokens += tokens

    def _scope(self, cache_salt: str | None) -> str:
        from blendrag.runtime.planning.scope import scope_of

        scope = scope_of(self.config.embedded(), cache_salt)
        assert scope is not None, "an embedded engine has no tenants"
        return scope

    def _tokenize(self, prompt: Prompt, reorder: bool = False) -> TokenizedPrompt:
        cut = as_prompt(prompt, self.config.delimiter, self.config.keep_delimiter)
        tokenized = self.tokens(self._order.arrange(cut) if reorder else cut)
        if not tokenized.ids:
            raise PromptError("the prompt is empty: give it some text")
        if len(tokenized.ids) >= self.max_model_len:
            raise PromptError(f"the prompt has {len(tokenized.ids)} tokens, the model takes {self.max_model_len} with "
                              "the answer: retrieve fewer or shorter chunks, or raise max_model_len")
        if len(tokenized.spans) > self.config.max_documents:
            raise PromptError(f"the prompt marks {len(tokenized.spans)} chunks, max_documents is "
                              f"{self.config.max_documents}: mark fewer, or raise BlendConfig.max_documents")
        return tokenized


class Progress:
    """What has been seen of one request's outputs; made when the request is handed in.

    Attributes:
        handed_out: the `kv_transfer_params` of each sample that has ended.
    """

    def __init__(self) -> None:
        self.first_token_s = 0.0
        self._submitted = time.perf_counter()
        self.handed_out: list[dict[str, Any]] = []
        self._samples: dict[int, Any] = {}

    def see(self, output: Any) -> None:
        """Completes an output of vLLM, which reports each of n samples on its own, with the other samples so far."""
        if not self.first_token_s:
            self.first_token_s = time.perf_counter() - self._submitted
        if handed_out := getattr(output, "kv_transfer_params", None):
            self.handed_out.append(handed_out)
        self._samples |= {sample.index: sample for sample in output.outputs}
        output.outputs = [self._samples[index] for index in sorted(self._samples)]


class Encoding:
    """Chunks on their way into the store.  Iterating yields the arguments of one `blendrag_encode` call after another;
    each call's answer goes to `take` before the next.

    Attributes:
        result: one for each chunk, complete once all calls were answered.
    """

    def __init__(self, requests: Requests, scope: str, ids: list[list[int]], behind: tuple[list[int], bool],
                 on_progress: Callable[[int, int], None] | None) -> None:
        self.result = [EncodedChunk("", len(chunk), False) for chunk in ids]
        self._requests = requests
        self._scope = scope
        self._ids = ids
        self._behind = behind
        self._on_progress = on_progress
        self._batch: list[int] = []
        self._done = 0

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        shortest = self._requests.config.min_chunk_tokens
        for batch in _batches(self._ids):
            self._batch = [number for number in batch if len(self._ids[number]) >= shortest]
            if self._batch:
                yield self._scope, [self._ids[number] for number in self._batch], *self._behind
            for _ in batch:
                self._done += 1
                if self._on_progress:
                    self._on_progress(self._done, len(self._ids))

    def take(self, answer: Sequence[Sequence[Any]]) -> None:
        """The answer to the call yielded last: key, and whether it is new, of each of its chunks."""
        for number, (key, new) in zip(self._batch, answer, strict=True):
            self.result[number] = EncodedChunk(key, len(self._ids[number]), new)
            if new:
                self._requests.count_encoded(len(self._ids[number]))


def pair(prompts: Prompt | Sequence[Prompt], params: Any) -> tuple[list[Prompt], list[Any]]:
    """Prompts with the sampling params of each; PromptError where their numbers differ."""
    many: list[Prompt] = [prompts] if isinstance(prompts, (str, BlendPrompt)) else list(prompts)
    each = list(params) if isinstance(params, Sequence) else [params] * len(many)
    if len(each) != len(many):
        raise PromptError(f"{len(many)} prompts came with {len(each)} sampling params: give one, or one for each")
    return many, each


def _batches(ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of chunks, in order, in batches that one pass takes comfortably."""
    batch: list[int] = []
    tokens = 0
    for number, chunk in enumerate(ids):
        if batch and tokens + len(chunk) > _ENCODE_BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += len(chunk)
    if batch:
        yield batch
