"""Blocking iterators for event loops: the loop stays free, and leaving early stops the work."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from typing import TypeVar

from blendrag.cancellation import Cancellation, cancelled_by

T = TypeVar("T")


async def iterate(start: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
    """The items of a blocking generator, which is made and run in a thread of its own.

    A thread per call rather than the loop's default executor, whose few workers would limit how many requests the
    engine can batch.  Whoever leaves early, by cancellation or by `break`, has the requests stopped that the generator
    handed in, and itself closed after its current item.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[str, T | BaseException | None]] = asyncio.Queue()
    left = threading.Event()
    cancellation = Cancellation()

    def send(kind: str, value: T | BaseException | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(arrived.put_nowait, (kind, value))

    def work() -> None:
        try:
            with cancelled_by(cancellation), contextlib.closing(start()) as items:
                for item in items:
                    if left.is_set():
                        return
                    send("item", item)
            send("end")
        except BaseException as error:
            send("error", error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="blendrag-stream", daemon=True).start()
    try:
        while True:
            kind, value = await arrived.get()
            if kind == "end":
                return
            if isinstance(value, BaseException):
                raise value
            yield value  # type: ignore[misc]
    finally:
        left.set()
        cancellation.cancel()


async def gather(starts: Iterable[Callable[[], Generator[T, None, None]]]) -> list[T]:
    """The last item of each generator, all run at once; the first error, or cancellation, stops them all."""
    tasks = [asyncio.ensure_future(_last(start)) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _last(start: Callable[[], Generator[T, None, None]]) -> T:
    async with contextlib.aclosing(iterate(start)) as items:
        async for item in items:
            last = item
    return last
