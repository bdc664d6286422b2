"""Requests that the engine sees all at once, and what its passes do with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from blendrag import BlendEngine
from blendrag.requests import RequestOptions
from blendrag.runtime.messages import BlendJob
from blendrag.runtime.passes.forward import rows_of
from blendrag.runtime.passes.worker_side import BlendConnectorWorker


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
        named = {field.name for field in fields(RequestOptions)}
        settings = {name: value for name, value in how.items() if name not in named}
        options = RequestOptions(**{name: value for name, value in how.items() if name in named},
                                 policy_settings=settings)
        tickets += engine._submit([prompt], [params], options)
    return tickets


def together(engine: BlendEngine, prompts: list[Any], params: Any, hows: list[dict[str, Any]]) -> list[Any]:
    """Answers to requests that arrive at once."""
    with held(engine):
        tickets = hand_in(engine, prompts, params, hows)
    return [engine._last(ticket) for ticket in tickets]


@dataclass
class Seen:
    """What passed through the worker side: the jobs of requests, rows and requests of each forward."""

    jobs: list[BlendJob] = field(default_factory=list)
    forwards: list[tuple[int, int]] = field(default_factory=list)


def worker_side(engine: BlendEngine) -> BlendConnectorWorker:
    """That of an engine in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = engine._start().call(lambda _: get_kv_transfer_group()).worker
    assert side is not None
    return side


@contextmanager
def watched(engine: BlendEngine, fail: Callable[[BlendJob], bool] = lambda job: False) -> Iterator[Seen]:
    """Notes what the passes do meanwhile; those of a job that shall fail do."""
    blender = worker_side(engine).blender
    forward, seen = blender.forward, Seen()
    load, run_tile = blender._load, forward.run_tile

    def noting_load(job: BlendJob) -> Any:
        seen.jobs.append(job)
        if fail(job):
            raise RuntimeError("told to fail")
        return load(job)

    def noting_tile(tile: Any) -> None:
        seen.forwards.append((rows_of(tile), len(tile)))
        run_tile(tile)

    blender._load, forward.run_tile = noting_load, noting_tile
    try:
        yield seen
    finally:
        del blender._load, forward.run_tile


def counted(engine: BlendEngine, name: str) -> int:
    """One of vLLM's own counters, `vllm:NAME`; they go on over all engines of a process."""
    metrics = engine._start().call(lambda vllm: vllm.get_metrics())
    return int(sum(metric.value for metric in metrics if metric.name == f"vllm:{name}"))
