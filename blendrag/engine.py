"""An embedded vLLM that blends stored chunk KV into prompts."""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from blendrag.config import BlendConfig
from blendrag.errors import EngineClosedError, PromptError
from blendrag.outputs import BlendOutput, EncodedChunk
from blendrag.policies import Policy
from blendrag.prompt import BlendPrompt, Chunk, as_prompt
from blendrag.stats import BlendStats, EngineStats
from blendrag.store import ChunkStore, open_store
from blendrag.tokens import SegmentTokenizer, TokenizedPrompt

Prompt = str | BlendPrompt

_ENCODE_BATCH_TOKENS = 8192
_numbers = itertools.count()


class BlendEngine:
    """vLLM with chunk reuse.  Construction is cheap: the model loads at the first use.

    >>> with BlendEngine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
    ...     engine.encode(documents)
    ...     prompt = BlendPrompt("Answer from these.\\n", *map(Chunk, documents), "\\nWhere is Paris?")
    ...     [output] = engine.generate(prompt, SamplingParams(max_tokens=20))
    ...     output.text, output.stats.chunks_reused

    Methods may be called from any number of threads; their requests share batches.

    Args:
        model: path or name of the model, as vLLM takes it.
        config: settings of blending; `BLENDRAG_*` variables and the defaults where None.
        engine_args: any of vLLM's engine arguments, `max_model_len=8192` for instance.
    """

    def __init__(self, model: str, *, config: BlendConfig | None = None, **engine_args: Any) -> None:
        self.model = str(model)
        self.config = config or BlendConfig()
        self.engine_args = engine_args
        self.stats = EngineStats()
        self._lock = threading.RLock()
        self._closed = False
        self._loop: Any = None
        self._tokens: SegmentTokenizer | None = None
        self._store: ChunkStore | None = None
        self._max_model_len = 0

    # Requests.

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Any = None, *, blend: bool = True,
                 policy: str | Policy | None = None, ratio: float | None = None, cache_salt: str | None = None,
                 lora_request: Any = None, **policy_settings: Any) -> list[BlendOutput]:
        """Completes prompts, all in one batch.

        Args:
            prompts: one or several; text is cut into chunks at `config.delimiter`.
            sampling_params: vLLM's `SamplingParams`, for all prompts or one for each.
            blend: False for vLLM's plain full prefill.
            policy, ratio, policy_settings: override the engine's policy for these requests.
            cache_salt: shares vLLM's prefix cache only with requests of the same salt.

        Returns:
            One output for each prompt, in their order.

        Raises:
            PromptError: a prompt is empty or longer than the model takes.
            ConfigError: an unknown policy or setting.
            EngineClosedError: the engine was closed.
        """
        many: list[Prompt] = [prompts] if isinstance(prompts, (str, BlendPrompt)) else list(prompts)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(many)
        if len(params) != len(many):
            raise PromptError(f"{len(many)} prompts came with {len(params)} sampling params: give one, or one for each")
        settings = dict(policy=policy, ratio=ratio, **policy_settings)
        tickets = self._submit(many, params, blend, settings, cache_salt, lora_request)
        try:
            return [self._last(ticket) for ticket in tickets]
        except BaseException:
            for ticket in tickets:
                ticket.abort()
            raise

    def stream(self, prompt: Prompt, sampling_params: Any = None, *, blend: bool = True,
               policy: str | Policy | None = None, ratio: float | None = None, cache_salt: str | None = None,
               lora_request: Any = None, **policy_settings: Any) -> Iterator[BlendOutput]:
        """Like `generate` for one prompt; yields the output so far whenever there is more of it.

        Closing the iterator stops the request in the engine.
        """
        settings = dict(policy=policy, ratio=ratio, **policy_settings)
        [ticket] = self._submit([prompt], [sampling_params], blend, settings, cache_salt, lora_request)
        try:
            for output in ticket:
                yield self._output(ticket, output)
        finally:
            ticket.abort()

    # Chunks.

    def encode(self, chunks: Sequence[str | Chunk], prefix: str = "",
               on_progress: Callable[[int, int], None] | None = None) -> list[EncodedChunk]:
        """Computes the KV of chunks and stores what is not stored yet.

        Args:
            chunks: texts, each exactly as it will stand in prompts.
            prefix: the text before the first chunk in the prompts to come (`BlendPrompt.prefix`).
                Chunks encoded behind it are exact when they come first.  Empty: the neutral
                variant, which serves any prompt.
            on_progress: called with (chunks done, chunks in all).

        Raises:
            StoreError: the store cannot be written.
            PromptError: prefix and chunk are longer than the model takes.
        """
        ids = [self.tokens.chunk_ids(c.text if isinstance(c, Chunk) else c) for c in chunks]
        prefix_ids, neutral = self._prefix(prefix)
        for number, chunk in enumerate(ids):
            if len(prefix_ids) + len(chunk) > self.max_model_len:
                raise PromptError(f"chunk {number} has {len(chunk)} tokens, the model takes {self.max_model_len} with "
                                  "the prefix: split it, or raise max_model_len")
        result = [EncodedChunk("", len(chunk), False) for chunk in ids]
        done = 0
        for batch in _batches(ids):
            wanted = [ids[number] for number in batch if len(ids[number]) >= self.config.min_chunk_tokens]
            found = iter(self._rpc("blendrag_encode", wanted, prefix_ids, neutral) if wanted else [])
            for number in batch:
                if len(ids[number]) >= self.config.min_chunk_tokens:
                    key, new = next(found)
                    result[number] = EncodedChunk(key, len(ids[number]), new)
                    with self._lock:
                        self.stats.encoded_chunks += new
                        self.stats.encoded_tokens += new * len(ids[number])
                done += 1
                if on_progress:
                    on_progress(done, len(ids))
        return result

    def stored(self, chunks: Sequence[str | Chunk], prefix: str = "") -> list[bool]:
        """Which chunks are stored, as `encode` with the same arguments would store them."""
        ids = [self.tokens.chunk_ids(c.text if isinstance(c, Chunk) else c) for c in chunks]
        prefix_ids, neutral = self._prefix(prefix)
        return list(self._rpc("blendrag_stored", ids, prefix_ids, neutral))

    # What the engine is made of.

    @property
    def tokens(self) -> SegmentTokenizer:
        """The tokenizer, segment by segment."""
        self._start()
        assert self._tokens is not None
        return self._tokens

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.tokens.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        self._start()
        return self._max_model_len

    @property
    def store(self) -> ChunkStore:
        """Where chunk KV is kept."""
        self._start()
        assert self._store is not None
        return self._store

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its thread died; a closed engine cannot be used again."""
        return self._closed or (self._loop is not None and self._loop.closed)

    def close(self) -> None:
        """Stops all requests, unloads the model and frees its memory.  The disk tier stays."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            store, self._store = self._store, None
            self._tokens = None
        if loop is not None:
            loop.close()
        if store is not None:
            store.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Any:
        """Starts the engine unless it runs; returns its loop."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: make a new BlendEngine")
            if self._loop is not None:
                return self._loop
            from blendrag.runtime.loop import EngineLoop
            from blendrag.runtime.start import start_engine

            name = f"engine-{next(_numbers)}"
            self._store = open_store(self.config.store_path, self.config.ram_bytes, name=name)
            loop = EngineLoop(lambda: start_engine(self.model, self.config, name, self.engine_args))
            try:
                loop.start()
            except BaseException:
                self._store.close()
                self._store = None
                raise
            self._loop = loop
            self._tokens = SegmentTokenizer(loop.call(lambda engine: engine.get_tokenizer()))
            self._max_model_len = loop.call(lambda engine: engine.vllm_config.model_config.max_model_len)
            atexit.register(_close, weakref.ref(self))
            return loop

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[Any], blend: bool, settings: dict[str, Any],
                cache_salt: str | None, lora_request: Any) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from blendrag.runtime.compat import token_prompt
        from blendrag.runtime.connector import MARKS

        loop = self._start()
        chosen = self.config.make_policy(**settings)
        tokenized = [self._tokenize(prompt) for prompt in prompts]
        tickets = []
        for prompt, given in zip(tokenized, params, strict=True):
            request = given.clone() if given is not None else SamplingParams()
            request.output_kind = RequestOutputKind.CUMULATIVE
            marks = {"spans": [list(span) for span in prompt.spans], "policy": chosen.settings()} if blend else False
            transfer = (request.extra_args or {}).get("kv_transfer_params") or {}
            request.extra_args = (request.extra_args or {}) | {"kv_transfer_params": transfer | {MARKS: marks}}
            tickets.append(loop.submit(token_prompt(prompt.ids, cache_salt), request, lora_request=lora_request))
        return tickets

    def _tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        tokenized = self.tokens(as_prompt(prompt, self.config.delimiter, self.config.keep_delimiter))
        if not tokenized.ids:
            raise PromptError("the prompt is empty: give it some text")
        if len(tokenized.ids) >= self.max_model_len:
            raise PromptError(f"the prompt has {len(tokenized.ids)} tokens, the model takes {self.max_model_len} with "
                              "the answer: retrieve fewer or shorter chunks, or raise max_model_len")
        return tokenized

    def _last(self, ticket: Any) -> BlendOutput:
        *_, output = ticket
        return self._output(ticket, output)

    def _output(self, ticket: Any, output: Any) -> BlendOutput:
        from blendrag.runtime.connector import MARKS

        found = (getattr(output, "kv_transfer_params", None) or {}).get(MARKS)
        cached = output.num_cached_tokens or 0
        length = len(output.prompt_token_ids or [])
        stats = BlendStats.from_dict(found) if found else BlendStats(
            prompt_tokens=length, prefix_cached_tokens=cached, rows=1 - cached / max(1, length))
        stats.first_token_s = ticket.first_token_s
        if output.finished:
            with self._lock:
                self.stats.add(stats)
        return BlendOutput(output, stats)

    def _prefix(self, prefix: str) -> tuple[list[int], bool]:
        """Ids to encode behind, and whether they are only the neutral variant's sink.

        Attention piles up on a sequence's first token; a chunk that began a sequence would carry
        such a sink into the middle of every prompt.
        """
        if prefix:
            return self.tokens.prefix_ids(prefix), False
        sink = self.tokens.leading_ids or [self.tokenizer.eos_token_id or 0]
        return list(sink), True

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._start().call(lambda engine: engine.collective_rpc(method, args=args))[0]


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


def _close(reference: weakref.ref[BlendEngine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()
