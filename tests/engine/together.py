"""Requests that the engine sees all at once, and what its passes do with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blendrag import BlendEngine


@contextmanager
def held(engine: BlendEngine) -> Iterator[None]:
    """The engine's thread waits meanwhile: what is handed in within arrives between two steps."""
    gate = threading.Event()
    holder = threading.Thread(target=engine._start().call, args=(lambda _: gate.wait(),))
    holder.start()
    try:
        yield
    finally:
        gate.set()
        holder.join()


def together(engine: BlendEngine, prompts: list[Any], params: Any, hows: list[dict[str, Any]]) -> list[Any]:
    """Answers to requests that arrive at once, each asked in a way of its own (`generate`'s arguments)."""
    with held(engine):
        tickets = []
        for prompt, how in zip(prompts, hows, strict=True):
            how = {"blend": True, "cache_salt": None, "lora_request": None} | how
            blend, salt, lora = (how.pop(name) for name in ("blend", "cache_salt", "lora_request"))
            tickets += engine._submit([prompt], [params], blend, how, salt, lora)
    return [engine._last(ticket) for ticket in tickets]
