"""Engines in a script of their own: `__main__` guards, memory that is free again, and ends of every kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import json
import os
import sys
import psutil
from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams
from blendrag.errors import EngineClosedError, ModelError

def use_in_a_fork(engine):
    reading, writing = os.pipe()
    if os.fork() == 0:
        errors = []
        for other in (engine, BlendEngine({model!r}, dtype="float32", enforce_eager=True)):
            try:
                other.generate("Once")
            except EngineClosedError as error:
                errors.append(str(error))
        engine.close()
        os.write(writing, json.dumps([engine.closed, errors]).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(reading, 10000))

def resident():
    return psutil.Process().memory_info().rss

text = "The lighthouse at Skerry Point was built in 1847 by Alan Marsh, who learned his trade on the Bell Rock. " * 3
found = []
for number in range(2):
    engine = BlendEngine({model!r}, config=BlendConfig(store_path={store!r}), dtype="float32", enforce_eager=True,
                         max_model_len=1024, kv_cache_memory_bytes=2**30)
    constructed = resident()
    new = engine.encode([text])[0].new
    [output] = engine.generate(BlendPrompt("Read: ", Chunk(text), " Who built it?"), SamplingParams(max_tokens=4))
    # Touch all of the paged cache, so that it counts as resident.
    engine._start().call(lambda vllm: vllm.collective_rpc(lambda worker: [
        layer.attention.kv_cache.zero_().numel() for layer in worker._encoder.model.layers]))
    running = resident()
    forked = use_in_a_fork(engine)
    [again] = engine.generate("Once", SamplingParams(max_tokens=2))
    if number:
        engine.close()
    else:
        del engine  # as in a notebook whose cell runs twice
    found.append(dict(constructed=constructed, running=running, closed=resident(), new=new,
                      reused=output.stats.chunks_reused, forked=forked, again=len(again.token_ids)))
print(json.dumps(found))

settings = dict(dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=2**26)
try:
    BlendEngine({broken!r}, **settings).generate("Once")
except ModelError as error:
    print("refused:", error, file=sys.stderr)
stream = BlendEngine({model!r}, **settings).stream("Once", SamplingParams(max_tokens=400, ignore_eos=True))
next(stream)
raise LookupError("a fault of the program")
"""


@pytest.fixture(scope="module")
def ended(own_process: Callable[..., tuple[str, str]], shallow: Path,
          tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a script without a main guard printed, and what it wrote to standard error."""
    folder = tmp_path_factory.mktemp("script")
    broken = without_weights(shallow, tmp_path_factory.mktemp("broken"))
    return own_process(SCRIPT.format(model=str(shallow), broken=str(broken), store=str(folder / "store")), exit_code=1)


def test_a_script_without_a_main_guard(ended: tuple[str, str]) -> None:
    first, second = json.loads(ended[0].splitlines()[-1])
    assert (first["reused"], second["reused"]) == (1, 1)
    assert (first["new"], second["new"]) == (True, False), "the second engine finds what the first one stored"
    for engine in (first, second):
        held = 2**30 + 200 * 2**20  # the paged cache and the weights
        assert engine["running"] - engine["closed"] > 0.9 * held
        assert engine["again"] == 2, "a fork leaves it alone"
        closed, errors = engine["forked"]
        assert closed
        assert len(errors) == 2, "of the parent's engine, and of one that cannot start beside its remains"
        assert all("start engines after the fork" in error for error in errors)
    assert second["closed"] - first["closed"] < 150 * 2**20


def test_a_program_that_fails_shows_its_own_fault(ended: tuple[str, str]) -> None:
    """An engine that could not start is left behind, and one that runs: vLLM's native threads would abort Python."""
    lines = ended[1].strip().splitlines()
    assert any(line.startswith("refused: vLLM cannot start") for line in lines)
    assert lines[-1].endswith("LookupError: a fault of the program")


ASYNC = """
import asyncio
import os
import signal
from blendrag import AsyncBlendEngine, SamplingParams
from blendrag.errors import EngineClosedError, ModelError

async def main():
    async with AsyncBlendEngine({model!r}, dtype="float32", enforce_eager=True, max_model_len=512,
                                kv_cache_memory_bytes=2**26) as engine:
        outputs = engine.generate("Once", SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(outputs)
        encoding = asyncio.create_task(engine.encode(["A chunk that takes a while. " * 60]))
        await asyncio.sleep(0)
        [core] = engine._started.result()[0]._llm.engine_core.resources.engine_manager.processes
        os.kill(core.pid, signal.SIGKILL)
        for waiting in (anext(outputs), anext(outputs), anext(outputs), encoding, engine.stored(["x"])):
            try:
                await waiting
            except (EngineClosedError, StopAsyncIteration) as error:
                print(type(error).__name__, error)
        print("closed", engine.closed)

{run}
"""


def test_an_engines_process_that_is_killed_ends_what_waits_for_it(own_process: Callable[..., tuple[str, str]],
                                                                  shallow: Path) -> None:
    printed, _ = own_process(ASYNC.format(model=str(shallow), run='if __name__ == "__main__": asyncio.run(main())'))
    ends = [line for line in printed.splitlines() if line.startswith("EngineClosedError")]
    assert len(ends) == 3
    assert all("the engine's process died" in line for line in ends)
    assert printed.splitlines()[-1] == "closed True"


LOOPS = """
import asyncio
import json
import os
import sys
import threading
import psutil
from blendrag import AsyncBlendEngine, SamplingParams
from blendrag.errors import EngineClosedError

async def use(engine):
    async for output in engine.generate("Once", SamplingParams(max_tokens=2)):
        pass

async def use_in_a_fork(engine):
    try:
        await use(engine)
    except EngineClosedError as error:
        print("fork", engine.closed, error, flush=True)
    await engine.close()

if __name__ == "__main__":
    engine = AsyncBlendEngine({model!r}, dtype="float32", enforce_eager=True, max_model_len=512,
                              kv_cache_memory_bytes=2**26)
    asyncio.run(use(engine))
    [core] = engine._started.result()[0]._llm.engine_core.resources.engine_manager.processes
    if (child := os.fork()) == 0:
        asyncio.run(use_in_a_fork(engine))
        sys.exit(0)  # as a web server's worker ends, with all that is registered for the end
    os.waitpid(child, 0)
    print("alive", core.is_alive())
    closing = threading.Thread(target=lambda: asyncio.run(engine.close()))
    closing.start()
    closing.join()
    print("closed", engine.closed, core.is_alive(), "EngineCore" in str(psutil.Process().children(recursive=True)))
"""


def test_an_engine_can_be_closed_from_any_event_loop_but_a_forks(own_process: Callable[..., tuple[str, str]],
                                                                shallow: Path) -> None:
    lines = own_process(LOOPS.format(model=str(shallow)))[0].splitlines()
    [fork] = [line for line in lines if line.startswith("fork")]
    assert fork.startswith("fork True the engine belongs to the process that this one was forked from")
    assert lines[-2:] == ["alive True", "closed True False False"]


def test_a_missing_main_guard_is_named(own_process: Callable[..., tuple[str, str]], shallow: Path) -> None:
    _, told = own_process(ASYNC.format(model=str(shallow), run="asyncio.run(main())"), exit_code=1)
    last = told.strip().splitlines()[-1]
    assert "script.py, which does its work without a guard" in last
    assert 'put what the file does under `if __name__ == "__main__":`' in last


def without_weights(model: Path, folder: Path) -> Path:
    """A copy of the model that only fails once vLLM runs."""
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder
