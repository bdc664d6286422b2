"""The ASGI middleware that lets any OpenAI client say which text is a document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fastapi import HTTPException

from blendrag.config import BlendConfig
from blendrag.errors import PromptError
from blendrag.runtime.serving import settings_of
from blendrag.serve.body import Rewrite, rewrite_chat, rewrite_completion

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REWRITES: dict[str, Rewrite] = {"/v1/chat/completions": rewrite_chat, "/v1/completions": rewrite_completion}


class DocumentsMiddleware:
    """Takes `documents` and delimiters out of the bodies of requests and tells vLLM's engine where documents are.

    A body is read when vLLM asks for it, so after its API key was checked; responses are not touched.  What names no
    documents goes on byte for byte.

    Args:
        app: vLLM's server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._config: BlendConfig | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one of the server's own events."""
        rewrite = None
        if scope["type"] == "http" and scope["method"] == "POST":
            rewrite = _REWRITES.get(scope["path"].removeprefix(scope.get("root_path", "")))
        if rewrite is None:
            await self._app(scope, receive, send)
            return
        if self._config is None:
            self._config = settings_of(scope["app"])
        await self._app(scope, _Rewritten(receive, rewrite, self._config), send)


class _Rewritten:
    """`receive` of a request whose body is rewritten before it is handed over; what follows the body is as it was."""

    def __init__(self, receive: Receive, rewrite: Rewrite, config: BlendConfig) -> None:
        self._receive = receive
        self._rewrite = rewrite
        self._config = config
        self._handed_over = False

    async def __call__(self) -> Message:
        if self._handed_over:
            return await self._receive()
        pieces = []
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message  # the client is gone
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        self._handed_over = True
        return {"type": "http.request", "body": self._rewritten(b"".join(pieces)), "more_body": False}

    def _rewritten(self, body: bytes) -> bytes:
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return body  # vLLM says what is wrong with it
        try:
            changed = isinstance(content, dict) and self._rewrite(content, self._config)
        except PromptError as error:
            # vLLM answers it as it does its own: as JSON, in OpenAI's form.
            raise HTTPException(400, str(error)) from error
        return json.dumps(content).encode() if changed else body
