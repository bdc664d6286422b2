"""Requests of a load to an `AsyncBlendEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from blendrag.async_engine import AsyncBlendEngine
from blendrag.bench.load.clients import Usage
from blendrag.errors import BlendError
from blendrag.prompt import BlendPrompt

_TRIES, _PAUSE_S = 100, 0.1


class EngineClient:
    """Sends prompts to an engine.

    Args:
        blend: False for vLLM's plain full prefill of every prompt.
    """

    def __init__(self, engine: AsyncBlendEngine, blend: bool) -> None:
        self._engine = engine
        self._blend = blend

    async def store(self, documents: Sequence[str], prefix: str, anywhere: bool, at_once: int) -> None:
        """Encodes documents behind the prefix, and once more behind none where that is needed."""
        if not self._blend:
            return
        await self._engine.encode(documents, prefix=prefix)
        if anywhere:
            await self._engine.encode(documents)

    async def reset(self) -> None:
        """Empties vLLM's prefix cache, as soon as the last request has left it."""
        for _ in range(_TRIES):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(_PAUSE_S)
        raise BlendError("vLLM's prefix cache cannot be emptied while requests run: end the other requests")

    async def stream(self, prompt: BlendPrompt, output_tokens: int) -> AsyncGenerator[Usage | None, None]:
        """See `Client`; tokenising the prompt is a part of the time, as it is in a server."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        count = 0
        async for output in self._engine.generate(prompt, params, blend=self._blend):
            if len(output.token_ids) > count:
                count = len(output.token_ids)
                yield None
        stats, length = output.stats, len(output.prompt_token_ids)
        if stats.prompt_tokens != length:
            raise BlendError(f"the statistics count {stats.prompt_tokens} prompt tokens where vLLM counts {length}: "
                             "report it")
        yield Usage(length, output.request_output.num_cached_tokens or 0, stats.reused_tokens, count, stats.rows)

    async def reused_tokens(self) -> int | None:
        """None: each request's usage says it."""
        return None
