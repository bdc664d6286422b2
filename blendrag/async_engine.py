"""The engine for asyncio: vLLM in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from blendrag.config import BlendConfig
from blendrag.errors import EngineClosedError
from blendrag.forks import Owner
from blendrag.guard import Quality
from blendrag.outputs import BlendOutput, EncodedChunk
from blendrag.policies import Policy, make_policy
from blendrag.prompt import Chunk
from blendrag.requests import Blend, Prefix, Progress, Prompt, Ratio, RequestOptions, Requests, pair
from blendrag.runtime.engine.launch import Launch
from blendrag.stats import EngineStats
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from blendrag.runtime.engine.async_llm import EngineProcess

_LOOK_AGAIN_S = 0.5


class AsyncBlendEngine:
    """`BlendEngine` for asyncio.  Construction is cheap: the model loads at the first use.

    >>> async with AsyncBlendEngine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
    ...     await engine.encode(documents)
    ...     async for output in engine.generate(prompt, SamplingParams(max_tokens=20)):
    ...         print(output.text)

    The model runs in a process of its own, so several engines can run at once, and the event loop is
    never held up.  That process imports the program's main file: what the file does must stand under
    `if __name__ == "__main__":`.  Chunks are stored in that process, and shared through
    `config.store_path`.

    An engine belongs to the event loop of its first use; `close` may be called from any other one.  Cancelling a task
    that waits for it stops the request in the engine.

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
        self._numbers = itertools.count()
        self._closed = False
        self._started: asyncio.Task[tuple[EngineProcess, Requests]] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._owner: Owner | None = None
        self._launch: Launch | None = None

    # Requests.

    async def generate(self, prompt: Prompt, sampling_params: Any = None, *, blend: Blend = True,
                       policy: str | Policy | None = None, ratio: Ratio | None = None, cache_salt: str | None = None,
                       lora_request: Any = None, explain: bool = False, request_id: str | None = None,
                       **policy_settings: Any) -> AsyncGenerator[BlendOutput, None]:
        """Completes one prompt; yields the output so far whenever there is more of it.

        Closing the generator, or cancelling the task that iterates over it, stops the request in the engine.

        Args:
            prompt: documents are chunks where text marks them (`mark_chunks`).
            sampling_params: vLLM's `SamplingParams`.
            blend: False for vLLM's plain full prefill; "always" for a blend pass also where that is estimated to
                gain nothing.
            policy, ratio, policy_settings: override the engine's policy for this request.
            cache_salt: shares stored chunks and vLLM's prefix cache only with what has the same salt.
            explain: let `BlendOutput.stats.map` tell, token by token, what was measured and computed.
            request_id: names the request in vLLM's logs and output; unique among the running ones.

        Raises:
            PromptError: the prompt is empty or longer than the model takes.
            ConfigError: an unknown policy or setting.
            ModelError: the engine cannot start.
            EngineClosedError: the engine was closed, or died.
        """
        process, requests = await self._start()
        options = RequestOptions(blend, policy, ratio, cache_salt, lora_request, explain, policy_settings)
        [made] = await asyncio.to_thread(requests.make, [prompt], [sampling_params], options)
        async with aclosing(self._outputs(process, requests, made, lora_request, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def complete(self, prompts: Prompt | Sequence[Prompt], sampling_params: Any = None, *, blend: Blend = True,
                       policy: str | Policy | None = None, ratio: Ratio | None = None, cache_salt: str | None = None,
                       lora_request: Any = None, explain: bool = False, **policy_settings: Any) -> list[BlendOutput]:
        """Completes prompts, all in one batch: `BlendEngine.generate`, awaited.

        Args:
            prompts: one or several.
            sampling_params: vLLM's `SamplingParams`, for all prompts or one for each.

        Returns:
            One finished output for each prompt, in their order.

        Raises:
            As `generate`; the other prompts' requests are stopped then.
        """
        many, params = pair(prompts, sampling_params)
        process, requests = await self._start()
        options = RequestOptions(blend, policy, ratio, cache_salt, lora_request, explain, policy_settings)
        made = await asyncio.to_thread(requests.make, many, params, options)
        tasks = [asyncio.create_task(_last(self._outputs(process, requests, one, lora_request))) for one in made]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Chunks.

    async def encode(self, chunks: Sequence[str | Chunk], prefix: Prefix = "",
                     on_progress: Callable[[int, int], None] | None = None, *,
                     cache_salt: str | None = None) -> list[EncodedChunk]:
        """Computes the KV of chunks and stores what is not stored yet; see `BlendEngine.encode`.

        Args:
            on_progress: called on the event loop, with (chunks done, chunks in all).
        """
        process, requests = await self._start()
        encoding = await asyncio.to_thread(requests.encoding, chunks, prefix, on_progress, cache_salt)
        for arguments in encoding:
            encoding.take(await process.call("blendrag_encode", *arguments))
        return encoding.result

    async def forget(self, chunks: Sequence[str | Chunk], prefix: Prefix = "", *,
                     cache_salt: str | None = None) -> int:
        """Deletes the KV of chunks and returns how many entries went; see `BlendEngine.forget`."""
        process, requests = await self._start()
        arguments = await asyncio.to_thread(requests.naming, chunks, prefix, cache_salt)
        return int(await process.call("blendrag_forget", *arguments))

    async def stored(self, chunks: Sequence[str | Chunk], prefix: Prefix = "", *,
                     cache_salt: str | None = None) -> list[bool]:
        """Which chunks are stored, as `encode` with the same arguments would store them."""
        process, requests = await self._start()
        arguments = await asyncio.to_thread(requests.naming, chunks, prefix, cache_salt)
        return list(await process.call("blendrag_stored", *arguments))

    async def quality(self) -> list[Quality]:
        """How good blended answers are, one entry for each policy; see `BlendEngine.quality`."""
        process, _ = await self._start()
        return [Quality(**told) for told in await process.call("blendrag_quality")]

    async def flush(self) -> None:
        """Returns when all requests are answered, their chunks are stored (`populate`) and audits done
        (`quality_guard`).

        Requests that come meanwhile wait for it.
        """
        process, _ = await self._start()
        await process.rest()

    async def reset_prefix_cache(self) -> bool:
        """Empties vLLM's prefix cache; stored chunks stay.

        Returns:
            False where running requests use blocks of it: nothing was removed then.
        """
        process, _ = await self._start()
        return await process.reset_prefix_cache()

    # What the engine is made of.

    async def tokens(self) -> SegmentTokenizer:
        """The tokenizer, segment by segment; its `tokenizer` is the model's own."""
        return (await self._start())[1].tokens

    async def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return (await self._start())[1].max_model_len

    async def fingerprint(self) -> str:
        """Identifies what stored KV and profiles depend on: weights, dtype, rotary tables, ranks."""
        process, _ = await self._start()
        return str((await process.call("blendrag_identity"))["fingerprint"])

    async def policy(self) -> Policy:
        """The policy of requests that name none: the settings', or that of the model's profile."""
        process, _ = await self._start()
        return make_policy((await process.call("blendrag_identity"))["policy"])

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its process died; a closed engine cannot be used again."""
        started = self._started
        if self._closed or self._forked:
            return True
        if started is None or not started.done() or started.cancelled() or started.exception() is not None:
            return False
        return started.result()[0].closed

    async def close(self) -> None:
        """Stops all requests and ends the engine's process.  The disk tier stays.

        May be called from another event loop than that of the requests, which may be closed by now.  An engine that is
        never closed ends with the program, or when nothing refers to it any more.  In a fork of the process that
        started the engine it does nothing.
        """
        if self._forked:
            return
        self._closed = True
        loop = self._started.get_loop() if self._started is not None else None
        if loop is asyncio.get_running_loop():
            await self._close_here()
        elif loop is not None:
            await _run_on(loop, self._close_here)
        if self._launch is not None:
            await asyncio.to_thread(self._launch.end)

    async def __aenter__(self) -> AsyncBlendEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _forked(self) -> bool:
        """Whether it was started in the process that this one is a fork of."""
        return self._owner is not None and self._owner.forked

    async def _start(self) -> tuple[EngineProcess, Requests]:
        """Starts the engine unless it runs."""
        if self._owner is not None:
            self._owner.require()
        if self._closed:
            raise EngineClosedError("the engine is closed: make a new AsyncBlendEngine")
        if self._started is None:
            self._owner = Owner()
            self._started = asyncio.create_task(self._start_process())
            # All tasks that wait for it may be cancelled meanwhile.
            self._started.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif self._started.get_loop() is not asyncio.get_running_loop():
            raise EngineClosedError("the engine belongs to the event loop of its first use: make one engine for each, "
                                    "or do all within one asyncio.run")
        return await asyncio.shield(self._started)

    async def _start_process(self) -> tuple[EngineProcess, Requests]:
        start = partial(_start_llm, self.model, self.config, self.engine_args)
        launch = self._launch = Launch(start)
        end = weakref.finalize(self, launch.end)
        try:
            llm, note = await asyncio.to_thread(launch)
            from blendrag.runtime.compat import attention_layers, load_tokenizer
            from blendrag.runtime.engine.async_llm import EngineProcess

            model = llm.vllm_config.model_config
            tokens = await asyncio.to_thread(lambda: SegmentTokenizer(load_tokenizer(model)))
            requests = Requests(self.config, tokens, model.max_model_len, self.stats, attention_layers(model))
            return EngineProcess(llm, note, launch.end), requests
        except BaseException:
            self._started = self._owner = None  # the next use tries again
            end()
            raise

    async def _close_here(self) -> None:
        """`close`, on the event loop of the first use."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        if self._started is None:
            return
        with suppress(Exception):  # it did not start, which those who wait for it see
            process, _ = await self._started
            await process.close()

    async def _outputs(self, process: EngineProcess, requests: Requests, made: tuple[Any, Any], lora_request: Any,
                       request_id: str | None = None) -> AsyncGenerator[BlendOutput, None]:
        progress = Progress()
        name = request_id or f"blend-{next(self._numbers)}"
        async with aclosing(process.outputs(name, *made, lora_request)) as outputs:
            async for output in outputs:
                progress.see(output)
                yield requests.output(output, progress)


def _start_llm(*arguments: Any) -> Any:
    """Imports vLLM, which takes seconds, off the event loop too."""
    from blendrag.runtime.engine.start import start_async_engine

    return start_async_engine(*arguments)


async def _run_on(loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine function on another thread's event loop, for as long as that runs."""
    if not loop.is_running():
        return
    done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(), loop))
    while loop.is_running() and not done.done():
        await asyncio.wait({done}, timeout=_LOOK_AGAIN_S)
    if done.done() and not done.cancelled():
        done.result()


async def _last(outputs: AsyncGenerator[BlendOutput, None]) -> BlendOutput:
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    return last
