"""What the server makes of one request's body, in whichever thread there is time for it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blendrag.config import BlendConfig
from blendrag.errors import RequestError
from blendrag.serve.access import bind
from blendrag.serve.body import rewrite
from blendrag.serve.fields import check_fields, named_in_params, set_documents
from blendrag.serve.reader import DocumentReader
from blendrag.serve.routes import ROUTES
from blendrag.tenants import Tenant


class Rewriting:
    """Turns bodies as they came into bodies as vLLM is handed them.  Safe to call from several threads.

    Args:
        load: makes the reader of documents; None where the server has no tokenizer.  Called once, when a document
            comes.
    """

    def __init__(self, config: BlendConfig, load: Callable[[], DocumentReader | None]) -> None:
        self._config = config
        self._load = load
        self._lock = threading.Lock()
        self._readers: list[DocumentReader | None] = []

    @property
    def ready(self) -> bool:
        """Whether the reader of documents is loaded, which takes a while."""
        return bool(self._readers)

    def __call__(self, content: bytes, path: str, tenant: Tenant | None = None) -> bytes:
        """The body that vLLM is handed: the same bytes where there is nothing to change.

        Raises:
            RequestError: the body asks for what makes no sense or is not allowed.
        """
        try:
            with _no_collections():
                body = json.loads(content)
        except (ValueError, RecursionError) as error:
            if tenant is not None:
                raise RequestError("body", "the body is no JSON: send an object") from error
            return content  # vLLM says what is wrong with it
        if not isinstance(body, dict):
            if tenant is not None:
                raise RequestError("body", "the body is no object: send one")
            return content
        try:
            changed = self._rewritten(body, path, tenant)
        except RecursionError as error:
            raise RequestError("body", "the body is nested too deeply: send less") from error
        return json.dumps(body).encode() if changed else content

    def _rewritten(self, body: dict[str, Any], path: str, tenant: Tenant | None) -> bool:
        """Changes a body in place, if at all."""
        route = ROUTES[path]
        check_fields(body, self._config)
        documents, changed = rewrite(body, route, self._config)
        named = named_in_params(body)
        if documents or named:
            reader = self._reader()
            if reader is not None:
                reader.check([*documents, *named])
            if route.blend_params:
                ids = reader.ids if reader is not None and not route.renders else None
                changed |= set_documents(body, documents, ids)
        if tenant is not None:
            bind(body, path, tenant)
        return changed or tenant is not None

    def _reader(self) -> DocumentReader | None:
        with self._lock:
            if not self._readers:
                self._readers.append(self._load())
            return self._readers[0]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Within it Python looks for no garbage.

    It would do so over and over while a large body becomes hundreds of thousands of lists, and nothing else could run.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
