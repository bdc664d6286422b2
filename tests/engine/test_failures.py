"""A part that fails costs its request a full prefill, and nobody else anything; a counter and one line tell."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams
from tests.engine.families import FAMILIES, build
from tests.engine.texts import PASSAGES, QUESTION
from tests.engine.together import forget_blocks, worker_side

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = build(next(f for f in FAMILIES if f.name == name), tmp_path_factory.mktemp("model"))
        return made[name]

    return get


@pytest.fixture
def start(engine_pool: Any, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.getbasetemp() / "failing-store"

    def run(name: str = "Llama") -> BlendEngine:
        engine: BlendEngine = engine_pool.get(
            models(name), config=BlendConfig(store_path=store, ram_bytes=0), dtype="float32", enforce_eager=True,
            max_model_len=1024, kv_cache_memory_bytes=2**26)
        engine.encode(PASSAGES)
        return engine

    return run


def prompt(*numbers: int) -> BlendPrompt:
    return BlendPrompt("Read. ", *(Chunk(PASSAGES[number]) for number in numbers), QUESTION)


def plain(engine: BlendEngine, *prompts: BlendPrompt) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, GREEDY, blend=False, cache_salt="plain")]


@contextmanager
def failing(engine: BlendEngine, error: Exception, times: int) -> Iterator[None]:
    """The next passes raise."""
    forward: Any = worker_side(engine).blender.forward
    run, left = forward.run_tile, [error] * times

    def fail(tile: Any) -> None:
        if left:
            raise left.pop()
        run(tile)

    forward.run_tile = fail
    try:
        yield
    finally:
        del forward.run_tile


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@pytest.mark.parametrize("error", [RuntimeError("an illegal access"), torch.OutOfMemoryError("out of memory")],
                         ids=["kernel", "memory"])
def test_a_pass_that_fails(start: Any, family: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(family)
    expected = plain(engine, prompt(0, 1))
    before = engine.stats.failures
    forget_blocks(engine)
    with failing(engine, error, times=1):
        [output] = engine.generate(prompt(0, 1), GREEDY, policy="none")
    assert [output.token_ids] == expected
    assert output.stats.failure == f"{type(error).__name__}: {error}"
    assert [chunk.reason for chunk in output.stats.chunks] == ["pass failed"] * 2
    assert engine.stats.failures == before + 1
    told = [record for record in caplog.records if "failed, prefilling in full" in record.message]
    assert len(told) == 1
    forget_blocks(engine)
    [again] = engine.generate(prompt(0, 1), GREEDY, policy="none")
    assert (again.stats.chunks_reused, again.stats.failure) == (2, "")


def test_the_others_of_a_batch_do_not_notice(start: Any) -> None:
    engine = start()
    prompts = [prompt(0, 1), prompt(2, 3), prompt(4, 5)]
    forget_blocks(engine)
    alone = [engine.generate(p, GREEDY, policy="none")[0].token_ids for p in prompts]
    exact = plain(engine, *prompts)
    forget_blocks(engine)
    with failing(engine, RuntimeError("a kernel"), times=2):  # the joint pass, and the first one alone
        outputs = engine.generate(prompts, GREEDY, policy="none")
    failed = [number for number, output in enumerate(outputs) if output.stats.failure]
    assert len(failed) <= 2
    for number, output in enumerate(outputs):
        assert output.token_ids == (exact if number in failed else alone)[number]


def test_a_full_pass_that_fails_too_is_left_to_vllm(start: Any) -> None:
    engine = start()
    expected = plain(engine, prompt(3, 1))
    forget_blocks(engine)
    with failing(engine, RuntimeError("a kernel"), times=2):
        [output] = engine.generate(prompt(3, 1), GREEDY, policy="none")
    assert [output.token_ids] == expected
    assert output.stats.failure == "RuntimeError: a kernel, then RuntimeError: a kernel"
    [again] = engine.generate(prompt(3, 1), GREEDY, policy="none")
    assert again.stats.failure == ""


def test_files_that_are_damaged_or_gone(start: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = start()
    keys = [chunk.key for chunk in engine.encode(PASSAGES[:3])]
    files = {path.stem: path for path in (tmp_path_factory.getbasetemp() / "failing-store").rglob("*.safetensors")}
    files[keys[0]].write_bytes(files[keys[0]].read_bytes()[:-100])
    files[keys[1]].unlink()
    forget_blocks(engine)
    [output] = engine.generate(prompt(0, 1, 2), GREEDY, policy="full")
    assert [chunk.reason for chunk in output.stats.chunks] == ["damaged", "damaged", ""]
    assert [output.token_ids] == plain(engine, prompt(0, 1, 2))
    assert engine.stored(PASSAGES[:3]) == [False, False, True]


def test_a_request_whose_chunks_are_read_keeps_nobody_waiting(start: Any) -> None:
    """Entries are on the disk alone; the disk answers the first request after the second one is done."""
    engine = start()
    expected = plain(engine, prompt(0, 1), prompt(2))
    forget_blocks(engine)
    ahead: Any = worker_side(engine).blender.entries._ahead
    read, begun, go_on = ahead._read, threading.Event(), threading.Event()

    def read_late(key: str) -> Any:
        begun.set()
        assert go_on.wait(60)
        return read(key)

    ahead._read = read_late
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(engine.generate, prompt(0, 1), GREEDY, policy="full")
        assert begun.wait(60)
        ahead._read = read
        [quick] = engine.generate(prompt(2), GREEDY, policy="full")
        assert not late.done()
        go_on.set()
        [slow] = late.result(60)
    assert [slow.token_ids, quick.token_ids] == expected
    assert [slow.stats.chunks_reused, quick.stats.chunks_reused] == [2, 1]
    assert slow.stats.load_s > quick.stats.load_s
    assert not [thread for thread in threading.enumerate() if thread.name == "blendrag-read"]


def test_a_store_that_vanishes_while_it_is_used(start: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = start()
    expected = plain(engine, prompt(5, 4))
    shutil.rmtree(tmp_path_factory.getbasetemp() / "failing-store")
    outputs = []
    for _ in range(2):
        forget_blocks(engine)
        outputs += engine.generate(prompt(5, 4), GREEDY, policy="none")
    assert [output.token_ids for output in outputs] == expected * 2
    assert all(output.stats.chunks_reused == 0 for output in outputs)
    engine.close()
