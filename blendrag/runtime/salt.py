"""Keeps blended KV out of vLLM's exact prefix cache, and lets the same blended prompt hit it again.

vLLM identifies a cached block by a hash chained over all tokens up to its end.  Blended KV is
approximate from its first reused token on, unless the stored KV is exact there.  From the block
that holds this token on, the chain continues from a salted hash; blocks before it keep their
ordinary hashes and are shared with every other request, both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from vllm.v1.request import Request


def salt_block_hashes(request: Request, exact_tokens: int, block_size: int, salt: bytes) -> None:
    """Salts the hashes of all blocks that reach beyond the first `exact_tokens` tokens.

    Must run before the scheduler first looks the request up.

    Args:
        block_size: tokens a hash stands for (vLLM's hash block size).
        salt: identifies everything the approximate KV depends on.
    """
    inner: Callable[[Any], list[Any]] | None = request._block_hasher
    if inner is None:
        return
    exact_blocks = exact_tokens // block_size

    def hasher(request: Request) -> list[Any]:
        hashes = request.block_hashes
        if exact_blocks == 0 or len(hashes) != exact_blocks:
            return inner(request)
        # The next block continues from a salted stand-in for the last exact block's hash.
        exact = hashes[-1]
        hashes[-1] = type(exact)(blake3(bytes(exact) + salt).digest()[: len(bytes(exact))])
        try:
            return inner(request)
        finally:
            hashes[-1] = exact

    if exact_blocks == 0:
        request.cache_salt = f"{request.cache_salt or ''}|blend:{salt.hex()}"
    request._block_hasher = hasher
    del request.block_hashes[exact_blocks:]
    request.update_block_hashes()
