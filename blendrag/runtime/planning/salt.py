"""Keeps blended KV out of vLLM's exact prefix cache, and lets the same blended prompt hit it again.

vLLM identifies a cached block by a hash chained over all tokens up to its end.  Blended KV is
approximate from its first reused token on, unless the stored KV is exact there.  From the block
that holds this token on, hashes are salted; blocks before it keep their ordinary hashes and are
shared with every other request, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
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


Salts = tuple[tuple[int, bytes], ...]
"""What blocks are filed under: each salt is that of the blocks which reach beyond so many tokens, until the next one's.

Ascending; blocks before the first have no salt.
"""


def salts_behind(salts: Salts, cached: int, salt: bytes) -> Salts:
    """What blocks are filed under where a pass computes what stands behind others that are cached.

    Its KV depends on theirs, too, which may be exact or blended.

    Args:
        salts: of the cached blocks; empty where they are exact.
        cached: tokens in them.
        salt: `salt_of` the pass.
    """
    behind = blake3(repr([salts, cached]).encode()).update(salt)
    return *salts, (cached, behind.digest(16))


def salt_block_hashes(request: Request, salts: Salts, block_size: int) -> list[Any]:
    """Salts the hashes of a request's blocks; must run before the scheduler first looks it up.

    Args:
        block_size: tokens a hash stands for (vLLM's hash block size).

    Returns:
        The unsalted hashes, which grow along with the request.
    """
    inner: Callable[[Any], list[Any]] | None = request._block_hasher
    plain = list(request.block_hashes)
    if inner is None:
        return plain

    def hasher(request: Request) -> list[Any]:
        shown = request.block_hashes
        del plain[len(shown) :]
        request.block_hashes = plain  # the chain goes on from what vLLM itself would have there
        try:
            added = inner(request)
        finally:
            request.block_hashes = shown
        plain.extend(added)
        return salted(added, salts, block_size, len(shown))

    request._block_hasher = hasher
    request.block_hashes[:] = salted(plain, salts, block_size)
    return plain


def salted(hashes: Sequence[Any], salts: Salts, block_size: int, first: int = 0) -> list[Any]:
    """The hashes that blocks have under these salts.

    A chained hash names all before it, so a salted copy does too: no token need be hashed again.

    Args:
        hashes: unsalted, of consecutive blocks.
        first: number of the first of the blocks.
    """
    end = first + len(hashes)
    borders = [max(first, min(end, start // block_size)) for start, _ in salts] + [end]
    result = list(hashes[: borders[0] - first])
    for (_, salt), start, stop in zip(salts, borders, borders[1:], strict=False):
        result += _salted(hashes[start - first : stop - first], start, salt)
    return result


def _salted(hashes: Sequence[bytes], first: int, salt: bytes) -> list[bytes]:
    """Hashes of blocks, each exclusive-ored with what BLAKE3 makes of the salt for the block's number.

    One call for all of a prompt's blocks: a hash of each one would take a millisecond for 32k tokens.  Both operands
    come from hash functions, so two results are equal as rarely as two of vLLM's own hashes.

    Args:
        first: number of the first block.
    """
    if not hashes:
        return []
    size = len(hashes[0])
    plain = np.frombuffer(b"".join(hashes), np.uint8)
    mask = np.frombuffer(blake3(salt).digest(plain.size, seek=first * size), np.uint8)
    masked: list[bytes] = (plain ^ mask).view(f"V{size}").tolist()
    return masked
