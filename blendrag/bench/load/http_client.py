"""Requests of a load to an OpenAI-compatible server, as /v1/completions takes them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from blendrag.bench.load.clients import Usage
from blendrag.errors import BlendError, ConfigError
from blendrag.prompt import BlendPrompt

_TRIES, _PAUSE_S = 100, 0.1
_TIMEOUT_S = 3600.0
_REUSED = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^}]*source="external_kv_transfer"[^}]*\} (\S+)$', re.M)


class HttpClient:
    """Sends prompts to a server.

    Args:
        url: of the server, without /v1.
        blend: False asks for a plain prefill of every prompt.
        stock: the server knows nothing of blending, so that there is nothing to ask for.
        api_key: for a server that wants one.
    """

    def __init__(self, url: str, blend: bool, *, stock: bool = False, api_key: str = "none") -> None:
        self._url = url.rstrip("/")
        self._blend = blend
        self._stock = stock
        self._openai = openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=api_key, max_retries=0,
                                          timeout=_TIMEOUT_S)
        self._model = ""

    async def model(self) -> str:
        """Name of the model that the server serves.

        Raises:
            BlendError: the server does not answer.
        """
        if not self._model:
            with self._errors():
                self._model = (await self._openai.models.list()).data[0].id
        return self._model

    async def close(self) -> None:
        """Closes the connections."""
        await self._openai.close()

    async def store(self, documents: Sequence[str], prefix: str, anywhere: bool, at_once: int) -> None:
        """Names documents in requests, some at a time, until the server says that all are stored.

        What traffic stores serves any prompt.
        """
        if not self._blend:
            return
        waiting = [list(documents[at : at + at_once]) for at in range(0, len(documents), at_once)]
        for _ in range(_TRIES):
            waiting = [batch for batch in waiting if await self._missing(batch, prefix)]
            if not waiting:
                return
            await asyncio.sleep(_PAUSE_S)
        raise BlendError("the server does not store the documents of requests: start `blendrag serve` without "
                         "--populate never, and with a store that holds them all")

    async def reset(self) -> None:
        """Empties the server's prefix cache.

        Raises:
            ConfigError: the server has no route for that.
            BlendError: requests of others keep it in use.
        """
        for _ in range(_TRIES):
            with self._errors():
                try:
                    answer = await self._openai.post(f"{self._url}/reset_prefix_cache", cast_to=object)
                except openai.NotFoundError as error:
                    raise ConfigError(f"{self._url} does not let its prefix cache be emptied between measurements: "
                                      "start it with VLLM_SERVER_DEV_MODE=1 in its environment") from error
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            await asyncio.sleep(_PAUSE_S)
        raise BlendError(f"the prefix cache of {self._url} cannot be emptied while requests run: end the others")

    async def stream(self, prompt: BlendPrompt, output_tokens: int) -> AsyncGenerator[Usage | None, None]:
        """See `Client`."""
        with self._errors():
            answer = await self._openai.completions.create(
                model=await self.model(), prompt=prompt.text, max_tokens=output_tokens, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body=self._extra(prompt.chunks))
            usage = None
            async with answer:
                async for piece in answer:
                    usage = piece.usage or usage
                    if piece.choices:
                        yield None
        if usage is not None:
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens if details else None) or 0
            yield Usage(usage.prompt_tokens, cached, None if self._blend else 0, usage.completion_tokens)

    async def reused_tokens(self) -> int | None:
        """What the server's metrics count; None where they do not."""
        if not self._blend:
            return None
        with self._errors():
            text = await self._openai.get(f"{self._url}/metrics", cast_to=str)
        found = _REUSED.findall(text)
        return round(sum(map(float, found))) if found else None

    def _extra(self, documents: Sequence[str]) -> dict[str, Any]:
        if self._stock:
            return {"ignore_eos": True}
        if not self._blend:
            return {"ignore_eos": True, "kv_transfer_params": {"blend": False}}
        return {"ignore_eos": True} | ({"documents": list(documents)} if documents else {})

    async def _missing(self, documents: Sequence[str], prefix: str) -> bool:
        """Whether some of them are not stored yet; the server is asked to store them then."""
        with self._errors():
            answer = await self._openai.completions.create(
                model=await self.model(), prompt=prefix + "\n\n".join(documents), max_tokens=1,
                extra_body=self._extra(documents))
        blend = ((answer.model_extra or {}).get("kv_transfer_params") or {}).get("blend") or {}
        return any(chunk["reason"] == "not stored" for chunk in blend.get("chunks", ()))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except openai.APIConnectionError as error:
            raise BlendError(f"{self._url} does not answer ({error.__cause__ or error}): check that the server runs "
                             "there") from error
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise BlendError(f"{self._url} failed on a request ({error}): its log says why") from error
