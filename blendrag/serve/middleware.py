"""The ASGI middleware that lets any OpenAI client say which text is a document, and that keeps tenants apart."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from blendrag.errors import RequestError
from blendrag.runtime.serving import settings_of, tokenizer_of
from blendrag.serve.access import Access, refusal
from blendrag.serve.reader import DocumentReader
from blendrag.serve.rewriting import Rewriting
from blendrag.serve.routes import ROUTES
from blendrag.tenants import Tenant, load_tenants

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_BODY_BYTES = 64 * 2**20
"""Neither vLLM nor uvicorn bounds a body; pictures in it need room."""
_SMALL_BODY_BYTES = 4096
"""A body of this size is read at once; what takes longer must not hold other requests up."""
_THREADS = 2


class DocumentsMiddleware:
    """Takes `documents` and marks out of the bodies of requests and tells vLLM's engine where documents are.

    A body is read when vLLM asks for it, so after its API key was checked; responses are not touched.  What names no
    documents goes on byte for byte.  With `BlendConfig.tenants` requests need a tenant's API key, and are its own.

    Args:
        app: vLLM's server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._pool = ThreadPoolExecutor(_THREADS, "blendrag-body")
        self._rewriting: Rewriting | None = None
        self._access: Access | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one of the server's own events."""
        if self._rewriting is None:
            self._start(scope["app"])  # at the server's start, which a faulty setting ends
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        tenant = None
        if self._access is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "not open to tenants"})
                return
            admitted = self._access.admit(scope["method"], path, Headers(scope=scope))
            if isinstance(admitted, Response):
                await admitted(scope, receive, send)
                return
            tenant = admitted
        try:
            await self._handle(scope, receive, send, path, tenant)
        finally:
            if self._access is not None and tenant is not None:
                self._access.end(tenant)

    def _start(self, app: Any) -> None:
        config = settings_of(app)
        if config.tenants is not None:
            self._access = Access(load_tenants(config.tenants))
        self._rewriting = Rewriting(config, partial(_reader, app))

    async def _handle(self, scope: Scope, receive: Receive, send: Send, path: str, tenant: Tenant | None) -> None:
        reads = scope["type"] == "http" and scope["method"] == "POST" and path in ROUTES
        if not reads:
            await self._app(scope, receive, send)
            return
        assert self._rewriting is not None
        body = _Body(receive, self._rewriting, self._pool, path, tenant)

        async def answer(message: Message) -> None:
            if body.refusal is None:
                await send(message)
            elif message["type"] == "http.response.start":
                # vLLM has made an answer of the exception, which names no field.
                await body.refusal(scope, receive, send)

        await self._app(scope, body, answer)


def _reader(app: Any) -> DocumentReader | None:
    tokenizer = tokenizer_of(app)
    return None if tokenizer is None else DocumentReader(*tokenizer)


class _Body:
    """`receive` of a request whose body is rewritten before it is handed over; what follows the body is as it was.

    Attributes:
        refusal: the answer to a body that was refused.
    """

    def __init__(self, receive: Receive, rewriting: Rewriting, pool: ThreadPoolExecutor, path: str,
                 tenant: Tenant | None) -> None:
        self.refusal: JSONResponse | None = None
        self._receive = receive
        self._rewriting = rewriting
        self._pool = pool
        self._path = path
        self._tenant = tenant
        self._handed_over = False

    async def __call__(self) -> Message:
        if self._handed_over:
            return await self._receive()
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message  # the client is gone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > _MAX_BODY_BYTES:
                raise self._refused(refusal(413, f"the body has more than {_MAX_BODY_BYTES} bytes: send less",
                                            "RequestTooLargeError"))
            more = message.get("more_body", False)
        self._handed_over = True
        try:
            body = await self._rewritten(b"".join(pieces))
        except RequestError as error:
            raise self._refused(refusal(400, str(error), param=error.param)) from error
        return {"type": "http.request", "body": body, "more_body": False}

    async def _rewritten(self, content: bytes) -> bytes:
        if len(content) <= _SMALL_BODY_BYTES and self._rewriting.ready:
            return self._rewriting(content, self._path, self._tenant)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._rewriting, content, self._path, self._tenant)

    def _refused(self, answer: JSONResponse) -> HTTPException:
        """What makes vLLM's server stop reading the request; its answer is replaced by ours."""
        self.refusal = answer
        return HTTPException(answer.status_code, "refused")
