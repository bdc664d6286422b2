"""Blocking generators on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from functools import partial

import pytest
from blendrag.adapters import gather, iterate
from blendrag.cancellation import stopped_with


class Source:
    """A generator that waits for leave before each item, and notes when it is closed."""

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.closed = threading.Event()

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(1000):
                self.leave.acquire()
                yield number
        finally:
            self.closed.set()


async def test_items_arrive_while_the_loop_runs() -> None:
    source = Source()
    seen = []
    async for item in iterate_with_leave(source):
        seen.append(item)
        if item == 3:
            break
    assert seen == [0, 1, 2, 3]


async def iterate_with_leave(source: Source):  # type: ignore[no-untyped-def]
    source.leave.release()
    async for item in iterate(source.items):
        yield item
        source.leave.release()  # were the loop blocked, nobody would give leave


async def test_leaving_closes_the_generator() -> None:
    source = Source()
    items = iterate(source.items)
    source.leave.release()
    assert await anext(items) == 0
    await items.aclose()
    source.leave.release()
    assert await asyncio.to_thread(source.closed.wait, 30)


async def test_cancellation_closes_every_generator() -> None:
    sources = [Source(), Source()]
    task = asyncio.ensure_future(gather([source.items for source in sources]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for source in sources:
        source.leave.release()


async def test_an_error_reaches_the_caller() -> None:
    def broken(error: BaseException) -> Generator[int, None, None]:
        yield 1
        raise error

    for error in (ValueError("no"), KeyError("k")):
        with pytest.raises(type(error)):
            await gather([partial(broken, error)])


async def test_gather_returns_the_last_items_in_order() -> None:
    def count(to: int) -> Generator[int, None, None]:
        yield from range(to)

    assert await gather([partial(count, 3), partial(count, 9), partial(count, 1)]) == [2, 8, 0]


async def test_cancellation_stops_a_request_before_its_first_output() -> None:
    stopped, ended = threading.Event(), threading.Event()

    def waiting() -> Generator[int, None, None]:
        stopped_with(stopped.set)  # as an engine does for each request
        started.set()
        try:
            stopped.wait(60)
            yield from ()
        finally:
            ended.set()

    started = threading.Event()
    task = asyncio.ensure_future(gather([waiting]))
    assert await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 30)
    assert stopped.is_set()
