"""Requests that the engine sees all at once, and what its passes do with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from blendrag import BlendEngine
from blendrag.runtime.messages import BlendJob


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


def forget_blocks(engine: BlendEngine) -> None:
    """Empties vLLM's prefix cache, so that the next requests compute what earlier ones have computed."""
    assert engine.reset_prefix_cache()


def hand_in(engine: BlendEngine, prompts: list[Any], params: Any, hows: list[dict[str, Any]]) -> list[Any]:
    """Tickets of requests, each asked in a way of its own (`generate`'s arguments)."""
    tickets = []
    for prompt, how in zip(prompts, hows, strict=True):
        how = {"blend": True, "cache_salt": None, "lora_request": None} | how
        blend, salt, lora = (how.pop(name) for name in ("blend", "cache_salt", "lora_request"))
        tickets += engine._submit([prompt], [params], blend, how, salt, lora, False)
    return tickets


def together(engine: BlendEngine, prompts: list[Any], params: Any, hows: list[dict[str, Any]]) -> list[Any]:
    """Answers to requests that arrive at once."""
    with held(engine):
        tickets = hand_in(engine, prompts, params, hows)
    return [engine._last(ticket) for ticket in tickets]


@dataclass
class Seen:
    """What passed through the worker half: jobs of each blend pass, rows and requests of each forward."""

    passes: list[list[BlendJob]] = field(default_factory=list)
    forwards: list[tuple[int, int]] = field(default_factory=list)

    @property
    def jobs(self) -> list[BlendJob]:
        return [job for jobs in self.passes for job in jobs]


@contextmanager
def watched(engine: BlendEngine, fail: Callable[[BlendJob], bool] = lambda job: False) -> Iterator[Seen]:
    """Notes what the passes do meanwhile; those with a job that shall fail do."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    blender = engine._start().call(lambda _: get_kv_transfer_group()).blender
    forward, seen = blender.forward, Seen()
    blend, load, run_tile = blender.blend, blender._load, forward.run_tile

    def noting_blend(jobs: Any) -> Any:
        seen.passes.append(list(jobs))
        return blend(jobs)

    def failing_load(jobs: Any) -> Any:
        if any(map(fail, jobs)):
            raise RuntimeError("told to fail")
        return load(jobs)

    def notingrun_tile(tile: Any) -> None:
        seen.forwards.append((sum(part.rows.stop - part.rows.start for _, part in tile), len(tile)))
        run_tile(tile)

    blender.blend, blender._load, forward.run_tile = noting_blend, failing_load, notingrun_tile
    try:
        yield seen
    finally:
        del blender.blend, blender._load, forward.run_tile


def counted(engine: BlendEngine, name: str) -> int:
    """One of vLLM's own counters, `vllm:NAME`; they go on over all engines of a process."""
    metrics = engine._start().call(lambda vllm: vllm.get_metrics())
    return int(sum(metric.value for metric in metrics if metric.name == f"vllm:{name}"))
