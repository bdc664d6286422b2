"""Looks into engines: what reaches them, and how long they work on it."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blendrag import BlendEngine
from tests.engine.serving import Server

PATIENCE_S = 120


class Watch(ABC):
    """What a probe may know of an engine.

    Attributes:
        prompt: length of the last prompt, in tokens.
        cached: how many of these were not computed.
        pause_s: between two looks, where a look alone would keep the engine's threads from working.
    """

    pause_s = 0.02
    prompt = 0
    cached = 0

    @abstractmethod
    def running(self) -> int:
        """How many requests the engine works on."""

    @abstractmethod
    def worked(self) -> int:
        """A count that each step of the engine raises, by one at least."""

    @abstractmethod
    def together(self) -> Any:
        """A context that yields a list, whose maximum is the greatest number of requests at once meanwhile."""

    def update(self) -> None:  # noqa: B027  # most are always up to date
        """Brings `prompt` and `cached` up to date."""

    def wait(self, reached: Callable[[int], bool]) -> None:
        """Returns once the number of running requests is as wanted."""
        until = time.monotonic() + PATIENCE_S
        while not reached(self.running()):
            if time.monotonic() > until:
                raise TimeoutError("the engine does not get there")
            time.sleep(self.pause_s)


class _Vllm(Watch):
    """An `LLMEngine` in this process; each of its steps is recorded."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._steps = 0
        self._seen: list[int] = []
        step = engine.step

        def record() -> Any:
            self._seen.append(engine.get_num_unfinished_requests())
            outputs = step()
            self._steps += 1
            for output in outputs:
                self.prompt, self.cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
            return outputs

        engine.step = record

    def release(self) -> weakref.ref[Any]:
        """Lets go of the engine, and leaves it as it was; returns what tells whether it is gone."""
        gone = weakref.ref(self.engine)
        del self.engine.step
        self.engine = None
        return gone

    def running(self) -> int:
        return int(self.engine.get_num_unfinished_requests())

    def worked(self) -> int:
        return self._steps

    @contextmanager
    def together(self) -> Iterator[list[int]]:
        self._seen.clear()
        yield self._seen


class VllmWatch(_Vllm):
    """The engine of a `vllm.LLM`."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm.llm_engine)


class BlendWatch(_Vllm):
    """A `BlendEngine`: its owner thread is asked, so that each look takes a step."""

    pause_s = 0

    def __init__(self, engine: BlendEngine) -> None:
        self.loop = engine._start()
        super().__init__(self.loop.call(lambda vllm: vllm))

    def running(self) -> int:
        return int(self.loop.call(lambda vllm: vllm.get_num_unfinished_requests()))


class ServerWatch(Watch):
    """A server, by its metrics.

    Args:
        server: that runs; nobody else uses it.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._before = self._counts()

    def running(self) -> int:
        return int(self.server.counted("vllm:num_requests_running"))

    def worked(self) -> int:
        return int(self.server.counted("vllm:generation_tokens_total"))

    def update(self) -> None:
        """Counts what came since the last update."""
        self.wait(lambda running: running == 0)
        now = self._counts()
        self.prompt, self.cached = (int(after - before) for after, before in zip(now, self._before, strict=True))
        self._before = now

    def _counts(self) -> tuple[float, float]:
        return (self.server.counted("vllm:request_prompt_tokens_sum"),
                self.server.counted("vllm:prompt_tokens_cached_total"))

    @contextmanager
    def together(self) -> Iterator[list[int]]:
        seen, over = [0], threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.append(self.running())

        thread = threading.Thread(target=look)
        thread.start()
        yield seen
        over.set()
        thread.join()


class PipelineWatch(Watch):
    """A pipeline of transformers: calls of the model's `generate` and `forward` are recorded."""

    def __init__(self, model: Any) -> None:
        self._forwards = 0
        self._running = 0
        self._rows: list[int] = []
        generate = model.generate

        def record(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self.prompt = ids.shape[1]
            self._rows.append(ids.shape[0])
            self._running += 1
            try:
                return generate(*args, **kwargs)
            finally:
                self._running -= 1

        def count(*_: Any) -> None:
            self._forwards += 1

        model.generate = record
        model.register_forward_hook(count)

    def running(self) -> int:
        return self._running

    def worked(self) -> int:
        return self._forwards

    @contextmanager
    def together(self) -> Iterator[list[int]]:
        self._rows[:] = [0]
        yield self._rows
