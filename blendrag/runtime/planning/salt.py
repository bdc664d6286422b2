"""Keeps blended KV out of vLLM's exact prefix cache, and lets the same blended prompt hit it again.

vLLM identifies a cached block by a hash chained over all tokens up to its end.  Blended KV is
approximate from its first reused token on, unless the stored KV is exact there.  From the block
that holds this token on, hashes are salted; blocks before it keep their ordinary hashes and are
shared with every other request, both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from blendrag.runtime.planning.placing import Plan


def salt_of(plan: Plan, sparse_attention: int | None) -> bytes:
    """Names all that the approximate KV of a prompt depends on besides the tokens before it; empty where all is exact.

    It is `Policy.depends_on` that says what this is.  A blend pass always computes the last of its tokens, so whether
    a chunk reaches that far counts, too.

    Args:
        sparse_attention: see `BlendConfig`; which blocks rows see depends on the prompt's length and all scores.
    """
    approximate = [placement for placement in plan.placements if not placement.exact]
    if not approximate:
        return b""
    policy, computed = plan.policy, len(plan.ids) - 1  # the last token is vLLM's
    placed = [(p.start, p.end, p.offset, p.key) for p in plan.placements]
    salt = blake3(repr([policy.serial, policy.settings(), sparse_attention, placed,
                        approximate[-1].end == computed]).encode())
    if policy.depends_on == "prompt" or sparse_attention is not None:
        salt.update(plan.ids[:computed].tobytes()).update(str(plan.question_start).encode())
    elif policy.depends_on == "chunks":
        salt.update(plan.ids[: approximate[-1].end].tobytes())
    return salt.digest(16)


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
    plain = list(request.block_hashes)

    def hasher(request: Request) -> list[Any]:
        shown = request.block_hashes
        del plain[len(shown) :]
        request.block_hashes = plain  # the chain goes on from what vLLM itself would have there
        try:
            found = inner(request)
        finally:
            request.block_hashes = shown
        plain.extend(found)
        return [_salted(known, salt) if number >= exact_blocks else known
                for number, known in enumerate(found, len(shown))]

    request._block_hasher = hasher
    hashes = request.block_hashes
    # A chained hash names all before it, so a salted copy does too: no token need be hashed again.
    hashes[exact_blocks:] = [_salted(known, salt) for known in hashes[exact_blocks:]]


def _salted(known: Any, salt: bytes) -> Any:
    return type(known)(blake3(known + salt).digest(len(known)))
