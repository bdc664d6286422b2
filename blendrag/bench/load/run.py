"""Sends the requests of a load when they are due, with decoding streams and short probes beside them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from blendrag.bench.load.clients import Client, Reply, send
from blendrag.bench.load.workload import Request
from blendrag.errors import BlendError
from blendrag.prompt import BlendPrompt

NEIGHBOUR_TOKENS = 1024
"""A decoding stream generates so many tokens, then begins again."""


@dataclass(frozen=True)
class Load:
    """How fast requests come: `rate` of them a second, or as soon as fewer than `in_flight` are under way."""

    rate: float | None = None
    in_flight: int | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.in_flight} in flight"


@dataclass(frozen=True)
class Traffic:
    """What is sent, the same for every arm.

    Attributes:
        requests, prompts: in order of arrival.
        neighbours: streams that decode all the time.
        probe_rate: short requests of one output token a second, Poisson.
        short: makes a short prompt from its name.
        seed: of the probes' arrivals.
    """

    requests: Sequence[Request]
    prompts: Sequence[BlendPrompt]
    output_tokens: int
    short: Callable[[str], BlendPrompt]
    neighbours: int = 0
    probe_rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What was seen of one load.

    Attributes:
        replies: one for each request, in order of arrival.
        probes: likewise for each probe.
        gaps: times between tokens of the decoding streams while requests were under way, in seconds.
        seconds: from the first request to the last answer.
        reused: prompt tokens from stored chunks, where only the total is known.
    """

    replies: Sequence[Reply]
    probes: Sequence[Reply]
    gaps: Sequence[float]
    seconds: float
    reused: int | None = None


async def run(client: Client, traffic: Traffic, load: Load, on_reply: Callable[[Reply], None] | None = None) -> Run:
    """Sends all requests and waits for the last answer; vLLM's prefix cache is empty before.

    Raises:
        BlendError: the prefix cache cannot be emptied, a decoding stream failed, or every request did.
    """
    await client.reset()
    before = await client.reused_tokens()
    async with _neighbours(client, traffic) as streams:
        started = time.perf_counter()
        probing = asyncio.create_task(_probes(client, traffic, started))
        try:
            replies = await _requests(client, traffic, load, started, on_reply)
            ended = time.perf_counter()
        finally:
            probing.cancel()
            probes = await probing
        gaps = [gap for moments in streams for end, gap in Reply(0, 0, tuple(moments)).gaps if started <= end <= ended]
    if all(reply.failure for reply in replies):
        raise BlendError(f"every request failed, the first one: {replies[0].failure}")
    after = await client.reused_tokens()
    reused = None if after is None or before is None else after - before
    return Run(replies, probes, gaps, ended - started, reused)


async def _requests(client: Client, traffic: Traffic, load: Load, started: float,
                    on_reply: Callable[[Reply], None] | None) -> list[Reply]:
    limit = asyncio.Semaphore(load.in_flight or len(traffic.requests))
    last_turn: dict[int, asyncio.Task[Reply]] = {}

    async def one(request: Request, before: asyncio.Task[Reply] | None) -> Reply:
        if load.rate is not None:
            await _until(started + request.arrival / load.rate)
        if before is not None:
            await asyncio.wait([before])
        async with limit:
            reply = await send(client, request.number, traffic.prompts[request.number], traffic.output_tokens)
        if on_reply is not None:
            on_reply(reply)
        return reply

    tasks = []
    for request in traffic.requests:
        task = asyncio.create_task(one(request, last_turn.get(request.conversation)))
        last_turn[request.conversation] = task
        tasks.append(task)
    return await _all(tasks)


async def _probes(client: Client, traffic: Traffic, started: float) -> list[Reply]:
    """Sends probes until it is cancelled; waits for those under way then."""
    tasks: list[asyncio.Task[Reply]] = []
    clock, at = random.Random(f"{traffic.seed} probes"), started
    try:
        while traffic.probe_rate > 0:
            at += clock.expovariate(traffic.probe_rate)
            await _until(at)
            prompt = traffic.short(f"probe {len(tasks)}")
            tasks.append(asyncio.create_task(send(client, len(tasks), prompt, output_tokens=1)))
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass
    return await _all(tasks)


@asynccontextmanager
async def _neighbours(client: Client, traffic: Traffic) -> AsyncIterator[list[list[float]]]:
    """Streams that decode until the end; yields, once all of them do, lists that their tokens' times are added to."""
    streams: list[list[float]] = []

    async def decode(number: int, decoding: asyncio.Event) -> None:
        turn = 0
        while True:
            moments = _Signalling(decoding)
            streams.append(moments)
            prompt = traffic.short(f"neighbour {number} {turn}")
            reply = await send(client, number, prompt, NEIGHBOUR_TOKENS, moments)
            if reply.failure:
                raise BlendError(f"a stream that decodes beside the requests failed: {reply.failure}")
            turn += 1

    events = [asyncio.Event() for _ in range(traffic.neighbours)]
    tasks = [asyncio.create_task(decode(number, event)) for number, event in enumerate(events)]
    starting = asyncio.gather(*(event.wait() for event in events))
    try:
        waiting: list[asyncio.Future[Any]] = [starting, *tasks]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        _raise_failed(tasks)
        yield streams
        _raise_failed(tasks)
    finally:
        starting.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(starting, *tasks, return_exceptions=True)


class _Signalling(list[float]):
    """Times of tokens; the first sets an event."""

    def __init__(self, event: asyncio.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, moment: float) -> None:
        super().append(moment)
        self._event.set()


def _raise_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


async def _all(tasks: Sequence[asyncio.Task[Reply]]) -> list[Reply]:
    """The results in order; those under way are cancelled where this is."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
