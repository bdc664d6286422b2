"""Scopes: which requests share stored chunks.

A scope is the namespace that entries are stored under and found by.  It is `BlendConfig.namespace`, or the namespace of
a tenant; a request's `cache_salt` makes a scope of its own within it.  What is stored with a salt is found with that
salt alone; what is stored without one, an index of the operator's for instance, by every request of the namespace.
"""

from __future__ import annotations

from blake3 import blake3

from blendrag.config import BlendConfig
from blendrag.store.keys import SCOPE_SEPARATOR

TENANT_TAG = f"blendrag-tenant{SCOPE_SEPARATOR}"
"""Begins the `cache_salt` by which a server's middleware says whose request it is: this, the tenant's namespace, the
separator, and the client's own salt or nothing.  The middleware overwrites what clients send."""

_SALT = "blendrag 1 cache salt"


def scope_of(config: BlendConfig, cache_salt: str | None) -> str | None:
    """The scope of a request; None for one that must not be blended.

    Args:
        config: with `tenants`, only requests that the middleware has tagged have a scope.
        cache_salt: the request's.  Only its hash becomes part of the scope: stores hold no client's secret, and a salt
            cannot spell another scope.
    """
    namespace, salt = config.namespace, cache_salt or ""
    if config.tenants is not None:
        if not salt.startswith(TENANT_TAG):
            return None
        namespace, separator, salt = salt.removeprefix(TENANT_TAG).partition(SCOPE_SEPARATOR)
        if not namespace or not separator:
            return None
    if not salt:
        return namespace
    digest = blake3(salt.encode("utf-8", "surrogatepass"), derive_key_context=_SALT).hexdigest(16)
    return f"{namespace}{SCOPE_SEPARATOR}{digest}"


def scopes_of(config: BlendConfig, cache_salt: str | None) -> tuple[str, ...]:
    """The scopes in which a request finds entries, its own first; empty for one that must not be blended."""
    own = scope_of(config, cache_salt)
    if own is None:
        return ()
    namespace = own.partition(SCOPE_SEPARATOR)[0]
    return (own,) if own == namespace else (own, namespace)
