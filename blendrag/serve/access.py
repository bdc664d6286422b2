"""Who may send which request: API keys of tenants, the routes that are safe to share, and rates."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from blendrag.errors import RequestError
from blendrag.runtime.planning.scope import TENANT_TAG
from blendrag.serve.routes import ROUTES
from blendrag.store.keys import SCOPE_SEPARATOR
from blendrag.tenants import Keys, Tenant

_OPEN = {"/health", "/ping", "/version", "/metrics"}
"""What the operator's machines ask for, with GET; as in vLLM, without a key."""
_REFUSED = {"/inference/v1/generate", "/invocations", "/v1/systemone"}
"""Requests that were rendered elsewhere, and those of which one cannot say for every version what they may hold."""
_READ = {"/v1/models"}
_PLAIN = {"/detokenize"}
"""With POST, what holds no prompt."""


class Access:
    """Admits requests of tenants.  Used in one event loop.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, tenants: Iterable[Tenant], clock: Callable[[], float] = time.monotonic) -> None:
        tenants = list(tenants)
        self._keys = Keys(tenants)
        self._rates = {tenant.name: _Rate(tenant, clock) for tenant in tenants}

    def admit(self, method: str, path: str, headers: Headers) -> Tenant | Response | None:
        """The tenant whose request it is, None for one that needs none, or the answer that refuses it.

        A tenant that is admitted has begun a request, which `end` ends.
        """
        if method == "OPTIONS" or (path in _OPEN and method in ("GET", "HEAD")):
            return None
        scheme, _, key = (headers.get("Authorization") or "").partition(" ")
        tenant = self._keys.find(key) if scheme.lower() == "bearer" else None
        if tenant is None:
            return JSONResponse({"error": "Unauthorized"}, 401)
        if not _shared(method, path):
            return refusal(404, "this route is not open to tenants: ask the server's operator", "NotFoundError")
        seconds = self._rates[tenant.name].begin()
        if seconds:
            return refusal(429, f"too many requests: send the next one in {seconds} s", "RateLimitError",
                           headers={"Retry-After": str(seconds)})
        return tenant

    def end(self, tenant: Tenant) -> None:
        """A request of this tenant has been answered."""
        self._rates[tenant.name].end()


def bind(body: dict[str, Any], path: str, tenant: Tenant) -> None:
    """Makes a request its tenant's: of what it stores and finds, nothing is shared with other tenants.

    Raises:
        RequestError: it asks for what the server keeps for all tenants together.
    """
    if path == "/v1/responses":
        for field in ("previous_response_id", "background"):
            if body.get(field):
                raise RequestError(field, f"{field} is not open to tenants, as the server keeps answers for all of "
                                   "them together: send the conversation as input")
        body["store"] = False
    if ROUTES[path].generates:
        salt = body.get("cache_salt") or ""
        # vLLM bounds the length of a salt and the characters in it, and ours has to fit, too.
        own = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:40] if salt else ""
        body["cache_salt"] = f"{TENANT_TAG}{tenant.namespace}{SCOPE_SEPARATOR}{own}"


def refusal(status: int, message: str, kind: str = "BadRequestError", param: str | None = None,
            headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in OpenAI's form, as vLLM's server answers it."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status, headers)


def _shared(method: str, path: str) -> bool:
    """Whether a route keeps tenants apart."""
    if method in ("GET", "HEAD"):
        return path in _READ or path.startswith("/v1/models/")
    route = ROUTES.get(path)
    return method == "POST" and path not in _REFUSED and (path in _PLAIN or (route is not None and route.salted))


class _Rate:
    """How many requests a tenant has sent: a bucket that fills up over a minute."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float]) -> None:
        self._per_second = tenant.requests_per_minute / 60 if tenant.requests_per_minute else None
        self._most = max(1.0, tenant.requests_per_minute or 1.0)
        self._concurrent = tenant.concurrent_requests
        self._clock = clock
        self._left = self._most
        self._at = clock()
        self._running = 0

    def begin(self) -> int:
        """Begins a request; or the whole seconds after which there is room for it."""
        if self._concurrent is not None and self._running >= self._concurrent:
            return 1
        if self._per_second is not None:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._at) * self._per_second)
            self._at = now
            if self._left < 1:
                return int((1 - self._left) / self._per_second) + 1
            self._left -= 1
        self._running += 1
        return 0

    def end(self) -> None:
        self._running -= 1
