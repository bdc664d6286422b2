"""One thread owns the engine: it starts it, steps it, and answers for every other thread.

vLLM's engine is not thread-safe, and on the CPU its worker threads are bound to the thread that
made it.  Callers submit requests and wait on queues; concurrent requests share batches.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from blendrag.errors import BlendError, EngineClosedError
from blendrag.forks import Owner
from blendrag.requests import Progress
from blendrag.runtime.engine.memory import free_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Ticket:
    """A request that was handed in; iterating yields vLLM's outputs as they come, cumulative."""

    def __init__(self, loop: EngineLoop, request_id: str) -> None:
        self.request_id = request_id
        self.progress = Progress()
        self._loop = loop
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        while not self._ended:
            self._loop.owner.require()
            output = self._outputs.get()
            if output is None:
                return
            if isinstance(output, BaseException):
                self._ended = True
                raise output
            self._ended = output.finished
            yield output

    def abort(self) -> None:
        """Stops the request in the engine; nothing where it has ended."""
        if not self._ended and not self._loop.owner.forked:
            self._ended = True
            self._outputs.put(None)  # lets go whoever waits on another thread
            self._loop.abort(self.request_id)

    def deliver(self, output: Any) -> None:
        """Called by the owner thread with an output or an exception."""
        if not isinstance(output, BaseException):
            self.progress.see(output)
        self._outputs.put(output)


class EngineLoop:
    """Runs a vLLM engine on a thread of its own.

    Args:
        make_engine: builds the engine; called on the owner thread.
        busy: whether the engine must be stepped.
    """

    def __init__(self, make_engine: Callable[[], Any], busy: Callable[[Any], bool]) -> None:
        self._make_engine = make_engine
        self._busy = busy
        self._commands: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count()
        self._started: Future[None] = Future()
        self._waiting_for_rest: list[Future[None]] = []
        self._closed = False
        self._reason = EngineClosedError("the engine is closed: make a new BlendEngine")
        self.owner = Owner()
        self._lock = threading.RLock()  # a garbage collection while it is held may close an engine
        self._thread = threading.Thread(target=self._run, name="blendrag-engine", daemon=True)

    def start(self) -> None:
        """Builds the engine; raises what building it raised, once all that it left behind is freed."""
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            # It still clears away vLLM's globals, which the next engine is about to make; and were it cut short by the
            # interpreter's end, C++ would abort.
            self.close()
            raise

    def submit(self, prompt: Any, params: Any, **options: Any) -> Ticket:
        """Hands in a request (`LLMEngine.add_request`'s arguments)."""
        ticket = Ticket(self, f"blend-{next(self._numbers)}")

        def add(engine: Any) -> None:
            self._tickets[ticket.request_id] = ticket
            try:
                engine.add_request(ticket.request_id, prompt, params, **options)
            except Exception as error:
                self._tickets.pop(ticket.request_id, None)
                ticket.deliver(error)

        self._command(add)
        return ticket

    def abort(self, request_id: str) -> None:
        """Stops a request; its blocks are free before the next step."""

        def stop(engine: Any) -> None:
            if self._tickets.pop(request_id, None) is not None:
                engine.abort_request([request_id])

        if self.closed:
            return  # its end is that of the request
        with suppress(EngineClosedError):
            self._command(stop)

    def call(self, function: Callable[[Any], T]) -> T:
        """Runs `function(engine)` on the owner thread, between steps, and returns what it returns."""
        future: Future[T] = Future()

        def work(engine: Any) -> None:
            try:
                future.set_result(function(engine))
            except BaseException as error:
                future.set_exception(error)

        self._command(work)
        return future.result()

    def rest(self) -> None:
        """Returns when the engine has nothing to do."""
        future: Future[None] = Future()
        self._command(lambda engine: self._waiting_for_rest.append(future))
        future.result()

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed or self.owner.forked

    def close(self) -> None:
        """Ends all requests and shuts the engine down; returns when its memory is free.  Nothing in a fork."""
        if self.owner.forked:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _command(self, command: Callable[[Any], None]) -> None:
        self.owner.require()
        with self._lock:
            if self._closed:
                raise EngineClosedError(str(self._reason))
            self._commands.put(command)

    def _run(self) -> None:
        engine: Any = None
        reason = EngineClosedError("the engine was closed before the request finished")
        try:
            engine = self._make_engine()
            self._started.set_result(None)
            while self._obey(engine):
                if self._busy(engine):
                    self._step(engine)
        except BaseException as error:
            logger.debug("engine thread ended", exc_info=True)
            if not self._started.done():
                self._started.set_exception(error)
            else:
                reason = EngineClosedError(f"the engine died ({type(error).__name__}: {error}): make a new BlendEngine")
                self._reason = reason
        finally:
            with self._lock:
                self._closed = True
            for ticket in self._tickets.values():
                ticket.deliver(reason)
            self._tickets.clear()
            self._refuse_rest(reason)
            for future in self._waiting_for_rest:
                future.set_exception(reason)
            if engine is not None:  # a start that failed has cleaned up after itself
                _shut_down(engine)
                del engine
                free_memory()

    def _obey(self, engine: Any) -> bool:
        """Runs waiting commands, and waits for one where there is nothing else to do; False to end."""
        idle = not self._busy(engine)
        while idle and self._waiting_for_rest:
            self._waiting_for_rest.pop().set_result(None)
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)
            idle = False

    def _step(self, engine: Any) -> None:
        for output in engine.step():
            ticket = self._tickets.get(output.request_id)
            if ticket is None:
                continue
            ticket.deliver(output)
            if output.finished:
                del self._tickets[output.request_id]

    def _refuse_rest(self, reason: BlendError) -> None:
        """Answers commands that came too late, so that nobody waits for ever."""

        class _Dead:
            def __getattr__(self, name: str) -> Any:
                raise reason

        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command(_Dead())


def _shut_down(engine: Any) -> None:
    try:
        engine.engine_core.shutdown()
    except Exception:
        logger.warning("vLLM did not shut down cleanly", exc_info=True)
