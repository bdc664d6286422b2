"""The engine for asyncio: the embedded engine's answers, from a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from blendrag import AsyncBlendEngine, BlendConfig, BlendEngine, BlendOutput, BlendPrompt, Chunk, SamplingParams
from blendrag.bench.load.engine_client import EngineClient
from blendrag.bench.load.figures import Figures, Goal
from blendrag.bench.load.prompts import Lengths, Prompts
from blendrag.bench.load.run import Load, Traffic, run
from blendrag.bench.load.turns import Conversations, Style, converse
from blendrag.bench.load.workload import Workload
from blendrag.bench.texts import Vocabulary
from blendrag.errors import ConfigError, EngineClosedError, ModelError, PromptError, StoreError
from blendrag.runtime.compat import output_handler
from tests.engine.policies import Broken, Last
from tests.engine.test_process import without_weights
from tests.engine.test_reuse import fresh, prompt
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM
from tests.engine.together import forget_blocks

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_logprobs": -1,
                            "kv_cache_memory_bytes": 2**30}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
SHORT = SamplingParams(temperature=0, max_tokens=4)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
PROMPTS: list[Any] = [prompt(0, 1), prompt(3, 2, 1), "Once upon a time", BlendPrompt(SYSTEM, QUESTION),
                      BlendPrompt(SYSTEM, Chunk(PASSAGES[4]), Chunk("Nobody stored this passage. " * 4), QUESTION)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(shallow: Path) -> AsyncIterator[AsyncBlendEngine]:
    config = BlendConfig(policies=("tests.engine.policies:Last",))
    async with AsyncBlendEngine(str(shallow), config=config, **SETTINGS) as engine:
        await engine.encode(PASSAGES)
        await engine.encode(PASSAGES[:1], prefix=SYSTEM)
        yield engine


def unfinished(engine: AsyncBlendEngine) -> int:
    """Requests that vLLM has not ended."""
    assert engine._started is not None
    return int(engine._started.result()[0]._llm.output_processor.get_num_unfinished_requests())


async def forget_all_blocks(engine: AsyncBlendEngine) -> None:
    """Empties vLLM's prefix cache."""
    assert await engine.reset_prefix_cache()


def logprobs(output: BlendOutput) -> list[float]:
    """Of the tokens that were chosen."""
    return [found[token].logprob for token, found in zip(output.token_ids, output.outputs[0].logprobs, strict=True)]


def told(output: BlendOutput) -> dict[str, Any]:
    """What the statistics say, but for times."""
    return {name: value for name, value in asdict(output.stats).items() if not name.endswith("_s")}


@pytest.mark.parametrize("how", [{"blend": False}, {"policy": "full"}, {"policy": "query"}], ids=str)
async def test_it_answers_as_the_embedded_engine_does(running: AsyncBlendEngine, engine: BlendEngine,
                                                      how: dict[str, Any]) -> None:
    engine.encode(PASSAGES)
    engine.encode(PASSAGES[:1], prefix=SYSTEM)
    forget_blocks(engine)
    expected = engine.generate(PROMPTS, GREEDY, **how)
    await forget_all_blocks(running)
    found = await running.complete(PROMPTS, GREEDY, **how)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.text == theirs.text
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-3)
        assert told(ours) == told(theirs)
        assert ours.stats.first_token_s > 0


async def test_with_all_rows_it_equals_plain_vllm(running: AsyncBlendEngine) -> None:
    plain = await running.complete(PROMPTS, GREEDY, blend=False, cache_salt=fresh())
    await forget_all_blocks(running)
    full = await running.complete(PROMPTS, GREEDY, policy="full")
    assert [output.text for output in full] == [output.text for output in plain]
    assert [output.stats.chunks_found for output in full] == [2, 3, 0, 0, 2]
    assert full[0].stats.recomputed_tokens > 0


async def test_eight_tasks_at_once_are_answered_as_one_by_one(running: AsyncBlendEngine) -> None:
    prompts = [prompt(n % 6, (n + 1 + n // 6) % 6) for n in range(8)]
    apart = []
    for one in prompts:
        await forget_all_blocks(running)
        apart += await running.complete(one, SHORT)
    await forget_all_blocks(running)
    before = running.stats.requests
    together = await asyncio.gather(*(running.complete(p, SHORT) for p in prompts))
    assert [output.text for [output] in together] == [output.text for output in apart]
    assert [output.stats.chunks_reused for [output] in together] == [2] * 8
    assert running.stats.requests == before + 8


async def test_a_generator_yields_the_output_so_far(running: AsyncBlendEngine) -> None:
    await forget_all_blocks(running)
    outputs = [output async for output in running.generate(prompt(0, 1), GREEDY, request_id="mine")]
    assert len(outputs) > 3
    assert [output.finished for output in outputs[-2:]] == [False, True]
    assert all(b.text.startswith(a.text) for a, b in pairwise(outputs))
    assert outputs[-1].request_output.request_id == "mine"
    assert outputs[-1].stats.chunks_reused == 2


async def test_several_samples_of_one_prompt(running: AsyncBlendEngine) -> None:
    [output] = await running.complete(prompt(0, 1), SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4))
    assert [len(sample.token_ids) for sample in output.outputs] == [4, 4, 4]


async def test_a_load_reuses_what_is_stored_and_its_tokens_add_up(running: AsyncBlendEngine) -> None:
    workload = Workload(requests=3, documents=4, per_request=3)
    tokens = await running.tokens()
    prompts = Prompts(Vocabulary(tokens), Lengths(document=40, system=20, answer=3), workload.documents)
    await EngineClient(running, blend=True).store([prompts.document(number) for number in range(4)], prompts.prefix,
                                                  anywhere=False, at_once=3)
    requests = workload.arrange()
    traffic = Traffic(requests, prompts.requests(requests), 3, prompts.short, neighbours=1, probe_rate=5)
    load, goal = Load(rate=10), Goal(ttft_ms=60_000)
    figures = {blend: Figures.of(str(blend), load, await run(EngineClient(running, blend), traffic, load), goal)
               for blend in (False, True)}
    plain, blended = figures[False].ledger, figures[True].ledger
    assert plain.prompt == blended.prompt == sum(len(tokens(prompt).ids) for prompt in traffic.prompts)
    assert plain.reused == 0
    assert (blended.reused or 0) > 0.5 * blended.prompt > blended.computed
    for one in figures.values():
        assert (one.failed, one.goodput) == (0, one.throughput)
        assert one.gaps
        assert one.tpot


async def test_conversations_are_measured_turn_by_turn(running: AsyncBlendEngine) -> None:
    conversations = Conversations(count=1, turns=2, per_turn=2, pool=4)
    lengths = Lengths(document=100, system=20, answer=2)
    prompts = Prompts(Vocabulary(await running.tokens()), lengths, conversations.pool)
    clients = {arm: EngineClient(running, arm == "blended") for arm in ("plain", "blended")}
    await clients["blended"].store([prompts.document(number) for number in range(4)], prompts.prefix, anywhere=True,
                                   at_once=2)
    first, second, whole = await converse(clients, conversations, Style.ACCUMULATED, prompts, 2)
    assert [figure.turn for figure in (first, second, whole)] == [1, 2, None]
    assert first.prompt_tokens + second.prompt_tokens == whole.prompt_tokens
    assert first.computed["plain"] == 1 > second.computed["plain"]  # the prefix cache holds the first turn
    assert first.computed["blended"] < 0.5


async def test_the_prefix_cache_is_emptied_once_no_request_uses_it(running: AsyncBlendEngine) -> None:
    text = "Once upon a time there was a lighthouse. " * 30
    await running.complete(text, SHORT)
    [again] = await running.complete(text, SHORT)
    outputs = running.generate(text, LONG)
    await anext(outputs)
    assert not await running.reset_prefix_cache()
    await outputs.aclose()
    await EngineClient(running, blend=False).reset()
    [anew] = await running.complete(text, SHORT)
    assert (again.stats.prefix_cached_tokens, anew.stats.prefix_cached_tokens) == (256, 0)


async def test_a_policy_of_the_users_own_that_the_settings_list(running: AsyncBlendEngine) -> None:
    for how in ({"policy": Last(tokens=5)}, {"policy": "last", "tokens": 5}):
        await forget_all_blocks(running)
        [output] = await running.complete(prompt(1, 2, 0), SHORT, **how)
        assert (output.stats.policy, output.stats.recomputed_tokens) == ("last", 15)
    with pytest.raises(ConfigError, match="do not know the policy class Broken: name it in the setting policies"):
        await running.complete(prompt(0), SHORT, policy=Broken())


async def test_a_cancelled_task_stops_its_requests(running: AsyncBlendEngine) -> None:
    task = asyncio.create_task(running.complete([prompt(0), prompt(1), "Once"], LONG))
    while unfinished(running) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert unfinished(running) == 0
    [output] = await asyncio.wait_for(running.complete("Once", SamplingParams(max_tokens=2)), 10)
    assert output.finished


async def test_a_request_cancelled_at_any_moment_leaves_nothing(running: AsyncBlendEngine) -> None:
    for turns in range(12):
        task = asyncio.create_task(running.complete("Once", LONG))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert unfinished(running) == 0


async def test_a_closed_generator_stops_its_request(running: AsyncBlendEngine) -> None:
    outputs = running.generate(prompt(0), LONG)
    await anext(outputs)
    assert unfinished(running) == 1
    await outputs.aclose()
    assert unfinished(running) == 0


async def test_one_prompt_that_cannot_be_is_the_end_of_the_batch(running: AsyncBlendEngine) -> None:
    """vLLM's own errors are those of an embedded engine."""
    with pytest.raises(Exception, match="vocab"):
        await running.complete(["Once", "Twice"], [LONG, SamplingParams(allowed_token_ids=[10**6])])
    assert unfinished(running) == 0


async def test_encoding_tells_what_is_new(running: AsyncBlendEngine) -> None:
    text, seen = fresh(), []
    before = running.stats.encoded_chunks
    assert await running.stored([text, PASSAGES[0]]) == [False, True]
    encoded = await running.encode([Chunk(text), "Too short."], on_progress=lambda *done: seen.append(done))
    assert [(chunk.new, bool(chunk.key)) for chunk in encoded] == [(True, True), (False, False)]
    assert seen == [(1, 2), (2, 2)]
    assert await running.stored([text]) == [True]
    assert (await running.forget([text]), await running.stored([text])) == (1, [False])
    assert running.stats.encoded_chunks == before + 1


async def test_input_that_is_no_prompt(running: AsyncBlendEngine) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        await running.complete("")
    with pytest.raises(PromptError, match="give one, or one for each"):
        await running.complete(["x"], [GREEDY, GREEDY])
    with pytest.raises(PromptError, match="raise max_model_len"):
        await anext(running.generate(BlendPrompt(Chunk(PASSAGES[0] * 40))))
    with pytest.raises(PromptError, match="split it"):
        await running.encode([PASSAGES[0] * 40])
    with pytest.raises(ConfigError, match="there is no policy 'magic'"):
        await running.complete("x", policy="magic")
    assert await running.complete([]) == []


async def test_an_error_of_the_worker_keeps_its_class(running: AsyncBlendEngine) -> None:
    assert running._started is not None
    process = running._started.result()[0]
    with pytest.raises(RuntimeError, match=r"AttributeError: .*no_such_method"):
        await process.call("no_such_method")


async def test_a_store_that_cannot_be_opened(shallow: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="store_path"):
        await AsyncBlendEngine(str(shallow), config=BlendConfig(store_path=tmp_path / "file")).complete("x")


async def test_a_model_vllm_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="check the model's path or name"):
        await AsyncBlendEngine(str(tmp_path)).complete("x")


async def test_what_stops_the_engines_process_at_its_start_is_told(shallow: Path, tmp_path: Path) -> None:
    engine = AsyncBlendEngine(str(without_weights(shallow, tmp_path)), **SETTINGS)
    with pytest.raises(ModelError, match="Cannot find any model weights"):
        await engine.complete("x")
    assert not engine.closed


async def test_an_engine_that_never_ran_closes(tmp_path: Path) -> None:
    async with AsyncBlendEngine(str(tmp_path)) as engine:
        assert not engine.closed
    assert engine.closed
    with pytest.raises(EngineClosedError, match="make a new AsyncBlendEngine"):
        await engine.complete("x")


async def test_an_engine_belongs_to_its_event_loop(running: AsyncBlendEngine) -> None:
    with pytest.raises(EngineClosedError, match="the event loop of its first use"):
        await asyncio.to_thread(lambda: asyncio.run(running.complete("x")))


async def test_closing_ends_what_runs(running: AsyncBlendEngine) -> None:
    """Comes last: it ends the engine of the other tests."""
    requests = [asyncio.create_task(running.complete(prompt(n), LONG)) for n in range(3)]
    while unfinished(running) < 3:
        await asyncio.sleep(0.01)
    encoding = asyncio.create_task(running.encode([fresh() * 4]))
    late = asyncio.create_task(running.complete("x", LONG))
    await asyncio.sleep(0)
    receiving = output_handler((await running._start())[0]._llm)
    await asyncio.wait_for(asyncio.gather(running.close(), running.close()), 60)
    assert receiving.cancelled()  # what vLLM takes for the engine's death, it logs
    for ended in await asyncio.wait_for(asyncio.gather(*requests, encoding, late, return_exceptions=True), 10):
        assert isinstance(ended, EngineClosedError)
    assert running.closed
    with pytest.raises(EngineClosedError, match="make a new AsyncBlendEngine"):
        await running.complete("x")
