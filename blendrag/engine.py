"""An embedded vLLM that blends stored chunk KV into prompts."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from blendrag.cancellation import stopped_with
from blendrag.config import BlendConfig
from blendrag.errors import EngineClosedError
from blendrag.forks import Owner
from blendrag.guard import Quality
from blendrag.outputs import BlendOutput, EncodedChunk
from blendrag.policies import Policy, make_policy
from blendrag.prompt import Chunk
from blendrag.requests import Blend, Prefix, Prompt, Ratio, RequestOptions, Requests, pair
from blendrag.stats import EngineStats
from blendrag.store import ChunkStore
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from blendrag.runtime.engine.loop import EngineLoop


class BlendEngine:
    """vLLM with chunk reuse.  Construction is cheap: the model loads at the first use.

    >>> with BlendEngine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
    ...     engine.encode(documents)
    ...     prompt = BlendPrompt("Answer from these.\\n", *map(Chunk, documents), "\\nWhere is Paris?")
    ...     [output] = engine.generate(prompt, SamplingParams(max_tokens=20))
    ...     output.text, output.stats.chunks_reused

    Methods may be called from any number of threads; their requests share batches.  An engine that nothing refers
    to any more is closed.

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
        self._owner: Owner | None = None
        self._loop: Any = None
        self._end: Any = None
        self._requests: Requests | None = None
        self._store: ChunkStore | None = None

    # Requests.

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Any = None, *, blend: Blend = True,
                 policy: str | Policy | None = None, ratio: Ratio | None = None, cache_salt: str | None = None,
                 lora_request: Any = None, explain: bool = False, **policy_settings: Any) -> list[BlendOutput]:
        """Completes prompts, all in one batch.

        Args:
            prompts: one or several; documents are chunks where text marks them (`mark_chunks`).
            sampling_params: vLLM's `SamplingParams`, for all prompts or one for each.
            blend: False for vLLM's plain full prefill; "always" for a blend pass also where that is estimated to
                gain nothing.
            policy, ratio, policy_settings: override the engine's policy for these requests.
            cache_salt: shares stored chunks and vLLM's prefix cache only with what has the same salt.
            explain: let `BlendOutput.stats.map` tell, token by token, what was measured and computed.

        Returns:
            One output for each prompt, in their order.

        Raises:
            PromptError: a prompt is empty or longer than the model takes.
            ConfigError: an unknown policy or setting.
            EngineClosedError: the engine was closed.
        """
        many, params = pair(prompts, sampling_params)
        tickets = self._submit(many, params, RequestOptions(blend, policy, ratio, cache_salt, lora_request, explain,
                                                            policy_settings))
        try:
            return [self._last(ticket) for ticket in tickets]
        except BaseException:
            for ticket in tickets:
                ticket.abort()
            raise

    def stream(self, prompt: Prompt, sampling_params: Any = None, *, blend: Blend = True,
               policy: str | Policy | None = None, ratio: Ratio | None = None, cache_salt: str | None = None,
               lora_request: Any = None, explain: bool = False, **policy_settings: Any) -> Iterator[BlendOutput]:
        """Like `generate` for one prompt; yields the output so far whenever there is more of it.

        Closing the iterator stops the request in the engine.
        """
        [ticket] = self._submit([prompt], [sampling_params], RequestOptions(
            blend, policy, ratio, cache_salt, lora_request, explain, policy_settings))
        try:
            for output in ticket:
                yield self._output(ticket, output)
        finally:
            ticket.abort()

    # Chunks.

    def encode(self, chunks: Sequence[str | Chunk], prefix: Prefix = "",
               on_progress: Callable[[int, int], None] | None = None, *,
               cache_salt: str | None = None) -> list[EncodedChunk]:
        """Computes the KV of chunks and stores what is not stored yet.

        Args:
            chunks: texts, each exactly as it will stand in prompts.
            prefix: the text before the first chunk in the prompts to come (`BlendPrompt.prefix`), or one
                of these prompts, which also says whether the tokenizer adds its own tokens (BOS).
                Chunks encoded behind it are exact when they come first.  Empty: the neutral
                variant, which serves any prompt.
            on_progress: called with (chunks done, chunks in all).
            cache_salt: they serve requests of the same salt, and no others.

        Raises:
            StoreError: the store cannot be written.
            PromptError: prefix and chunk are longer than the model takes.
        """
        encoding = self._running.encoding(chunks, prefix, on_progress, cache_salt)
        for arguments in encoding:
            encoding.take(self._rpc("blendrag_encode", *arguments))
        return encoding.result

    def forget(self, chunks: Sequence[str | Chunk], prefix: Prefix = "", *, cache_salt: str | None = None) -> int:
        """Deletes the KV of chunks, as `encode` with the same arguments stored it; returns how many entries went.

        What is not stored counts as nothing.  The prefix itself stays, as other chunks stand behind it too.  A chunk
        that was encoded behind several prefixes is forgotten behind each of them separately.

        Raises:
            StoreError: the store cannot be written.
        """
        return int(self._rpc("blendrag_forget", *self._running.naming(chunks, prefix, cache_salt)))

    def stored(self, chunks: Sequence[str | Chunk], prefix: Prefix = "", *,
               cache_salt: str | None = None) -> list[bool]:
        """Which chunks are stored, as `encode` with the same arguments would store them."""
        return list(self._rpc("blendrag_stored", *self._running.naming(chunks, prefix, cache_salt)))

    def flush(self) -> None:
        """Returns when all requests are answered, their chunks are stored (`populate`) and audits done
        (`quality_guard`)."""
        self._start().rest()

    def reset_prefix_cache(self) -> bool:
        """Empties vLLM's prefix cache; stored chunks stay.

        Returns:
            False where running requests use blocks of it: nothing was removed then.
        """
        return bool(self._start().call(lambda engine: engine.reset_prefix_cache()))

    def quality(self) -> list[Quality]:
        """How good blended answers are, one entry for each policy that requests asked for.

        Empty without `BlendConfig.quality_guard`.  `flush` waits for the audits that are due.
        """
        return [Quality(**told) for told in self._rpc("blendrag_quality")]

    # What the engine is made of.

    @property
    def tokens(self) -> SegmentTokenizer:
        """The tokenizer, segment by segment."""
        return self._running.tokens

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.tokens.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._running.max_model_len

    @property
    def fingerprint(self) -> str:
        """Identifies what stored KV and profiles depend on: weights, dtype, rotary tables, ranks."""
        return str(self._rpc("blendrag_identity")["fingerprint"])

    @property
    def policy(self) -> Policy:
        """The policy of requests that name none: the settings', or that of the model's profile."""
        return make_policy(self._rpc("blendrag_identity")["policy"])

    @property
    def store(self) -> ChunkStore:
        """Where chunk KV is kept."""
        self._start()
        assert self._store is not None
        return self._store

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its thread died; a closed engine cannot be used again."""
        return self._closed or self._forked or (self._loop is not None and self._loop.closed)

    def close(self) -> None:
        """Stops all requests, unloads the model and frees its memory.  The disk tier stays.

        In a fork of the process that started the engine it does nothing.
        """
        if self._forked:
            return
        with self._lock:
            self._closed = True
            end, self._end = self._end, None
            self._loop = None
            self._store = None
            self._requests = None
        if end is not None:
            end()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _running(self) -> Requests:
        self._start()
        requests = self._requests
        if requests is None:
            raise EngineClosedError("the engine was closed meanwhile: make a new BlendEngine")
        return requests

    @property
    def _forked(self) -> bool:
        """Whether it was started in the process that this one is a fork of."""
        return self._owner is not None and self._owner.forked

    def _start(self) -> Any:
        """Starts the engine unless it runs; returns its loop."""
        if self._owner is not None:
            self._owner.require()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: make a new BlendEngine")
            if self._loop is not None:
                return self._loop
            from blendrag.runtime.compat import attention_layers, busy, in_one_process, scheduler_connector
            from blendrag.runtime.engine.loop import EngineLoop
            from blendrag.runtime.engine.start import start_engine

            # Nothing that the loop's thread holds may refer to this object, or it would never be freed.
            loop = EngineLoop(partial(start_engine, self.model, self.config, self.engine_args), busy)
            # Before what vLLM registers: were the thread cut short by the interpreter's end, C++ would abort.
            atexit.register(loop.close)
            end = weakref.finalize(self, _end, loop)
            end.atexit = False
            self._owner = Owner()
            try:
                loop.start()
            except BaseException:
                self._owner = None
                end()
                raise
            self._loop, self._end = loop, end
            self._store = loop.call(lambda engine: scheduler_connector(engine).store)
            tokenizer = loop.call(lambda engine: engine.get_tokenizer())
            model = loop.call(lambda engine: engine.vllm_config.model_config)
            one_process = loop.call(lambda engine: in_one_process(engine.vllm_config))
            self._requests = Requests(self.config, SegmentTokenizer(tokenizer), model.max_model_len, self.stats,
                                      attention_layers(model), one_process)
            return loop

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[Any], options: RequestOptions) -> list[Any]:
        loop = self._start()
        made = self._running.make(prompts, params, options)
        tickets = [loop.submit(prompt, request, lora_request=options.lora_request) for prompt, request in made]
        for ticket in tickets:
            stopped_with(ticket.abort)
        return tickets

    def _last(self, ticket: Any) -> BlendOutput:
        *_, output = ticket
        return self._output(ticket, output)

    def _output(self, ticket: Any, output: Any) -> BlendOutput:
        return self._running.output(output, ticket.progress)

    def _rpc(self, method: str, *args: Any) -> Any:
        from blendrag.runtime.engine.failure import result_of

        # Errors travel as values: of an exception vLLM reads one rank's, and takes the next rank's for a later answer.
        return result_of(self._start().call(lambda engine: engine.collective_rpc("blendrag_call", args=(method, args))))


def _end(loop: EngineLoop) -> None:
    """Closes the loop of an engine that was closed, or freed."""
    atexit.unregister(loop.close)
    loop.close()
