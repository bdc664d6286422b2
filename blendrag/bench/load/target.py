"""What a load is sent to: an engine of its own, a server of its own, or servers that run already."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from blendrag.bench.load.clients import Client
from blendrag.errors import BlendError, ModelError

ARMS = ("plain", "blended")
"""The two arms of every measurement; they differ in whether blending is on, and in nothing else."""

_PAUSE_S = 0.5
_LOG_LINES = 15


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        model: path or name of the model.
        settings: a YAML file of `BlendConfig`'s fields.
        options: engine options of vLLM, as on a command line.
        engine_args: engine arguments that suit the machine, unless the options say otherwise.
        serve: start `blendrag serve` and use HTTP; otherwise an `AsyncBlendEngine` is started.
        url: a server that runs already and blends; no other is started.
        plain_url: a server without blending for the arm "plain"; both arms use the same server without it.
    """

    model: str
    settings: Path | None = None
    options: Sequence[str] = ()
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    serve: bool = False
    url: str | None = None
    plain_url: str | None = None

    @asynccontextmanager
    async def open(self, max_model_len: int) -> AsyncIterator[Mapping[str, Client]]:
        """Starts what is not running; yields a client for each arm.

        Args:
            max_model_len: longest prompt plus answer that will be sent, in tokens.

        Raises:
            BlendError: the engine or the server cannot start, or a server does not answer.
        """
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(self._server(max_model_len)) if self.serve else self.url
            yield await stack.enter_async_context(self._engine(max_model_len) if url is None else self._http(url))

    @asynccontextmanager
    async def _engine(self, max_model_len: int) -> AsyncIterator[Mapping[str, Client]]:
        from blendrag.async_engine import AsyncBlendEngine
        from blendrag.bench.load.engine_client import EngineClient
        from blendrag.config import BlendConfig
        from blendrag.models import engine_arguments, resolve
        from blendrag.runtime.engine.options import engine_options

        config = BlendConfig.from_yaml(self.settings) if self.settings else BlendConfig()
        if "populate" not in config.model_fields_set:  # as `blendrag serve` does
            config = config.model_copy(update={"populate": "on_miss"})
        args: dict[str, Any] = {"max_model_len": max_model_len, **self.engine_args}
        args |= engine_arguments(self.model) | engine_options(self.options)
        async with AsyncBlendEngine(resolve(self.model), config=config, **args) as engine:
            yield {arm: EngineClient(engine, blend=arm == "blended") for arm in ARMS}

    @asynccontextmanager
    async def _http(self, url: str) -> AsyncIterator[Mapping[str, Client]]:
        from blendrag.bench.load.http_client import HttpClient

        api_key = os.environ.get("OPENAI_API_KEY", "none")
        clients = {"plain": HttpClient(self.plain_url or url, blend=False, stock=self.plain_url is not None,
                                       api_key=api_key),
                   "blended": HttpClient(url, blend=True, api_key=api_key)}
        try:
            for client in clients.values():
                await client.model()
            yield clients
        finally:
            for client in clients.values():
                await client.close()

    @asynccontextmanager
    async def _server(self, max_model_len: int) -> AsyncIterator[str]:
        """Runs `blendrag serve` on a free port; yields its URL once it answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        command = [sys.executable, "-m", "blendrag", "serve", self.model, *self._settings(), "--host", "127.0.0.1",
                   "--port", url.rsplit(":", 1)[1], "--max-model-len", str(max_model_len), *self.options]
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # it can empty its prefix cache then
        with tempfile.TemporaryFile("w+") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                async with httpx.AsyncClient() as client:
                    while not await _healthy(client, url):
                        if server.poll() is not None:
                            log.seek(0)
                            raise ModelError("the server ended at its start: "
                                             + "".join(log.readlines()[-_LOG_LINES:]).strip())
                        await asyncio.sleep(_PAUSE_S)
                yield url
                if server.poll() is not None:
                    raise BlendError(f"the server died with status {server.returncode}: run `blendrag serve` yourself "
                                     "and measure it with --http, to see its log")
            finally:
                server.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait)

    def _settings(self) -> list[str]:
        return ["--settings", str(self.settings)] if self.settings else []


async def _healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).is_success
    except httpx.HTTPError:
        return False
