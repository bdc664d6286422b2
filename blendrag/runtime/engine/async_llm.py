"""An engine in a process of its own: vLLM's `AsyncLLM`, whose ends are our errors.  Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from blendrag.errors import EngineClosedError
from blendrag.runtime.compat import end_requests, output_handler
from blendrag.runtime.engine.failure import FailureNote, result_of


class EngineProcess:
    """Made on the event loop that will use it.

    Args:
        llm: a running `AsyncLLM` with `BlendWorker`s.
        note: what the process leaves when it dies.
        end: ends the process; may block.
    """

    def __init__(self, llm: Any, note: FailureNote, end: Callable[[], None]) -> None:
        self._llm = llm
        self._note = note
        self._end_process = end
        self._closing = False
        self._ended = asyncio.get_running_loop().create_future()
        self._receiving = output_handler(llm)
        self._receiving.add_done_callback(lambda _: self._end())

    async def outputs(self, request_id: str, prompt: Any, params: Any,
                      lora_request: Any) -> AsyncGenerator[Any, None]:
        """vLLM's outputs of one request as they come; closing the generator stops the request.

        Raises:
            EngineClosedError: the engine was closed, or died, before the request finished.
        """
        if self.closed:
            raise self._reason()
        finished = False
        try:
            async with aclosing(self._llm.generate(prompt, params, request_id, lora_request=lora_request)) as found:
                async for output in found:
                    finished = output.finished
                    yield output
        except Exception as error:
            if self.closed or isinstance(error, EngineDeadError):  # what is torn down fails in many ways
                finished = True
                raise self._reason() from error
            if isinstance(error, EngineGenerateError):
                raise (error.__cause__ or error) from None  # what an embedded engine raises
            raise
        finally:
            # vLLM forgets a request that is cancelled while it is being handed in.
            if not finished and not self.closed:
                await self._llm.abort(request_id)

    async def call(self, method: str, *args: Any) -> Any:
        """What the first rank's `BlendWorker` method returns; the worker's BlendError is raised here."""
        if self.closed:
            raise self._reason()
        answer = asyncio.ensure_future(self._llm.collective_rpc("blendrag_call", args=(method, args)))
        try:
            # vLLM never answers a call that was under way when its engine died.
            await asyncio.wait({answer, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._reason()
            answers = answer.result()
        except Exception as error:
            if not self.closed and not isinstance(error, EngineDeadError):
                raise
            raise self._reason() from error
        finally:
            answer.cancel()
        return result_of(answers)

    async def reset_prefix_cache(self) -> bool:
        """Empties vLLM's prefix cache; False where blocks of requests are in use, which leaves it as it is."""
        if self.closed:
            raise self._reason()
        try:
            return await self._llm.reset_prefix_cache() is not False
        except EngineDeadError as error:
            raise self._reason() from error

    async def rest(self) -> None:
        """Returns when the engine has nothing to do; requests that come meanwhile wait."""
        if self.closed:
            raise self._reason()
        try:
            await self._llm.pause_generation(mode="wait", clear_cache=False)
            await self._llm.resume_generation()
        except EngineDeadError as error:
            raise self._reason() from error

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing or bool(self._llm.errored)

    async def close(self) -> None:
        """Ends all requests and the process; returns when it is gone."""
        self._closing = True
        self._end()
        end_requests(self._llm)
        self._receiving.cancel()  # before vLLM's shutdown, which it would take for the engine's death, and log
        await asyncio.wait({self._receiving})
        await asyncio.to_thread(self._end_process)
        end_requests(self._llm)  # of those that were being handed in

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _reason(self) -> EngineClosedError:
        if self._closing:
            return EngineClosedError("the engine was closed before the request finished")
        told = self._note.read()
        why = ": ".join(told) if told else "its log says why"
        return EngineClosedError(f"the engine's process died ({why}): make a new AsyncBlendEngine")
