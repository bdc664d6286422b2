"""Threads, event loops, servers and notebooks: one engine thread serves them all, and cancelled work stops there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import add
from typing import Annotated, Any, TypedDict

import httpx
import pytest
import uvicorn
from blendrag import BlendEngine
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from IPython.core.interactiveshell import InteractiveShell
from langgraph.graph import END, START, StateGraph

from langchain_blendrag import BlendLLM, ChatBlend

from .engine_state import looks_until

PROMPTS = ["One, two, three,", "The capital of France is", "Red, green,", "Monday, Tuesday,"]
ENDLESS = {"max_tokens": 1800, "ignore_eos": True}


@pytest.fixture
def chat(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine, temperature=0, max_tokens=4)


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: BlendEngine) -> Iterator[None]:
    """After each test the engine is idle, its thread is the same one, and no thread of ours is left."""
    engine.flush()
    before = _threads()
    yield
    engine.flush()
    assert looks_until(engine, lambda running: running == 0) == 0
    for thread in _threads() - before:
        thread.join(30)
        assert not thread.is_alive(), thread.name
    assert [thread.name for thread in before] == ["blendrag-engine"]
    assert _threads() == before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("blendrag")}


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_32_threads_share_one_model(engine: BlendEngine, kind: Any) -> None:
    model = kind(engine=engine, temperature=0, max_tokens=4)
    alone = [model.invoke(prompt) for prompt in PROMPTS]
    before = threading.active_count()
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(model.invoke, PROMPTS * 8))
    assert threading.active_count() == before
    assert [_text(answer) for answer in answers] == [_text(answer) for answer in alone] * 8


async def test_many_tasks_stream_at_once(chat: ChatBlend) -> None:
    async def read(prompt: str) -> str:
        return "".join([str(chunk.content) async for chunk in chat.astream(prompt)])

    alone = [str(chat.invoke(prompt).content) for prompt in PROMPTS]
    assert await asyncio.gather(*map(read, PROMPTS * 4)) == alone * 4


class State(TypedDict):
    answers: Annotated[list[str], add]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_parallel_branches_of_a_graph(chat: ChatBlend, asynchronous: bool) -> None:
    def branch(prompt: str) -> Any:
        def ask(_: State) -> State:
            return {"answers": [str(chat.invoke(prompt).content)]}

        async def aask(_: State) -> State:
            return {"answers": [str((await chat.ainvoke(prompt)).content)]}

        return aask if asynchronous else ask

    graph = StateGraph(State)
    for prompt in PROMPTS:
        graph.add_node(prompt, branch(prompt))
        graph.add_edge(START, prompt)
        graph.add_edge(prompt, END)
    compiled: Any = graph.compile()
    result = await compiled.ainvoke({"answers": []}) if asynchronous else compiled.invoke({"answers": []})
    assert sorted(result["answers"]) == sorted(str(chat.invoke(prompt).content) for prompt in PROMPTS)


async def test_a_cancelled_group_stops_in_the_engine(chat: ChatBlend, engine: BlendEngine) -> None:
    group = asyncio.gather(*[chat.ainvoke(prompt, **ENDLESS) for prompt in PROMPTS])
    await asyncio.to_thread(looks_until, engine, lambda running: running == 4)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert await asyncio.to_thread(looks_until, engine, lambda running: running == 0) < 100


class Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@pytest.fixture
def address(chat: ChatBlend) -> Iterator[str]:
    """A FastAPI server that streams answers."""
    app = FastAPI()

    @app.get("/answer")
    async def answer(question: str, max_tokens: int = 4) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            async for chunk in chat.astream(question, max_tokens=max_tokens, ignore_eos=True):
                yield str(chunk.content)

        return StreamingResponse(pieces())

    server = Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.ready.wait(60)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/answer"
    server.should_exit = True
    thread.join()


async def test_a_server_streams_and_stops_when_its_clients_leave(chat: ChatBlend, engine: BlendEngine,
                                                                 address: str) -> None:
    expected = [str(chat.invoke(prompt, ignore_eos=True).content) for prompt in PROMPTS]
    async with httpx.AsyncClient(timeout=120) as client:
        whole = await asyncio.gather(*[client.get(address, params={"question": prompt}) for prompt in PROMPTS])
        assert [answer.text for answer in whole] == expected
        for prompt in PROMPTS[:1]:
            async with client.stream("GET", address, params={"question": prompt, "max_tokens": 1800}) as answer:
                await anext(answer.aiter_bytes())
    assert await asyncio.to_thread(looks_until, engine, lambda running: running == 0) < 200


async def test_a_notebook_cell_may_do_all_of_it(chat: ChatBlend) -> None:
    """Cells run on the kernel's running event loop, by this very method of IPython."""
    shell = InteractiveShell(user_ns={"chat": chat})
    cell = """
plain = chat.invoke("One, two, three,").content
awaited = (await chat.ainvoke("One, two, three,")).content
streamed = "".join([chunk.content async for chunk in chat.astream("One, two, three,")])
pieces = "".join(chunk.content for chunk in chat.stream("One, two, three,"))
batch = [answer.content for answer in chat.batch(["One, two, three,"] * 3)]
"""
    result = await shell.run_cell_async(cell, transformed_cell=shell.transform_cell(cell))
    result.raise_error()
    names = shell.user_ns
    assert names["plain"] == names["awaited"] == names["streamed"] == names["pieces"] != ""
    assert names["batch"] == [names["plain"]] * 3


def test_one_event_loop_after_another(chat: ChatBlend) -> None:
    answers = [asyncio.run(chat.ainvoke(PROMPTS[0])).content for _ in range(2)]
    assert answers == [chat.invoke(PROMPTS[0]).content] * 2


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else str(answer.content)
