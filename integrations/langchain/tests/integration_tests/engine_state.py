"""What tests look for in a running engine."""

from __future__ import annotations

from collections.abc import Callable

from blendrag import BlendEngine


def looks_until(engine: BlendEngine, reached: Callable[[int], bool]) -> int:
    """How many looks at the engine it took until the number of running requests was as wanted.

    Each look takes at least a step, so a request of many tokens that went on would outlast a few of them.
    """
    looks = 0
    while not reached(engine._start().call(lambda vllm: vllm.get_num_unfinished_requests())):
        looks += 1
    return looks
