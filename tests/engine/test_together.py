"""Many requests at once on engines that are short of something: one pass for all, preemption, and every kind of
request that vLLM knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams
from blendrag.errors import ModelError
from blendrag.reading import as_prompt
from blendrag.requests import RequestOptions
from blendrag.runtime.compat import scheduler_connector
from tests.engine.families import build, named
from tests.engine.test_reuse import fresh, prompt
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM
from tests.engine.together import counted, forget_blocks, hand_in, held, together, watched

LENGTH = 1024
BLOCK = 128
BLOCK_BYTES = 2**17
ROWS = 256
SHORTEST = 7
SETTINGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": LENGTH,
                            "kv_cache_memory_bytes": 28 * BLOCK_BYTES}
SAME = ("reused_tokens", "recomputed_tokens", "rows", "prefix_cached_tokens", "chunks_reused", "failure")

Make = Callable[..., BlendEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(named("Llama"), tmp_path_factory.mktemp("together") / "model")


@pytest.fixture
def make(engine_pool: Any, folder: Path) -> Make:
    """An engine of the pool, with the passages stored."""

    def get(**settings: Any) -> BlendEngine:
        engine: BlendEngine = engine_pool.get(folder, **SETTINGS | settings)
        engine.encode(PASSAGES)
        return engine

    return get


@pytest.fixture
def short(make: Make) -> BlendEngine:
    """Short of everything: 27 blocks, a small batch, and chunks that may be short too."""
    return make(config=BlendConfig(min_chunk_tokens=SHORTEST), max_num_batched_tokens=ROWS, max_num_seqs=16,
                structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True})


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, **{"ignore_eos": True} | more)


def salted(*hows: dict[str, Any]) -> list[dict[str, Any]]:
    return [how | {"cache_salt": fresh()} for how in hows]


def said(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def told(output: Any) -> list[Any]:
    return [getattr(output.stats, name) for name in SAME]


def assert_full_equals_plain(engine: BlendEngine, prompts: list[Any], params: SamplingParams) -> list[Any]:
    """Blended all at once, plain one by one."""
    blended = together(engine, prompts, params, salted(*[{"policy": "full"}] * len(prompts)))
    plain = [engine.generate(p, params, blend=False, cache_salt=fresh())[0] for p in prompts]
    assert said(blended) == said(plain)
    assert [output.finish_reason for output in blended] == [output.finish_reason for output in plain]
    assert [output.stats.failure for output in blended] == [""] * len(prompts)
    return blended


def filled(engine: BlendEngine, parts: list[str | Chunk], length: int) -> BlendPrompt:
    """The parts and as many full stops as make it `length` tokens."""
    while len(engine.tokens(as_prompt(BlendPrompt(*parts), engine.config.delimiter, False)).ids) < length:
        parts = [*parts, "."]
    return BlendPrompt(*parts)


def equal_parts(length: int) -> list[int]:
    count = -(-length // ROWS)
    size = -(-length // count)
    return [size] * (count - 1) + [length - size * (count - 1)]


def test_a_forward_has_rows_of_one_request_and_no_more_than_a_batch(short: BlendEngine) -> None:
    """So what a request gets does not depend on what else runs."""
    prompts = [prompt(0, 1), prompt(4, 5, 3, 2), prompt(2)]
    with watched(short) as seen:
        outputs = assert_full_equals_plain(short, prompts, greedy(4))
    lengths = [len(output.prompt_token_ids) - 1 for output in outputs]
    assert seen.forwards == [(rows, 1) for length in lengths for rows in equal_parts(length)]
    assert max(rows for rows, _ in seen.forwards) <= ROWS


@pytest.mark.parametrize("policy", ["full", "query"])
def test_preempted_requests_are_blended_again(short: BlendEngine, policy: str) -> None:
    """Three blocks each at first, four soon: there is room for nine, then for six."""
    # What a resumed request finds in the prefix cache ends in the question, so that its rows are the same again.
    prompts = [filled(short, [SYSTEM, Chunk(PASSAGES[a]), "\n\n", Chunk(PASSAGES[b]), QUESTION], 3 * BLOCK - 4)
               for a, b in ((0, 1), (1, 0), (3, 4))]
    alone = [short.generate(p, greedy(40), policy=policy, cache_salt=fresh())[0] for p in prompts]
    before, preempted = (short.stats.requests, short.stats.chunks_reused), counted(short, "num_preemptions")
    with watched(short) as seen:
        outputs = together(short, prompts * 4, greedy(40), salted(*[{"policy": policy}] * 12))
    assert counted(short, "num_preemptions") - preempted >= 3
    again = [job for job in seen.jobs if job.resumed]
    assert len(seen.jobs) - len(again) == 12
    assert again, "some found that their blocks had been taken"
    assert said(outputs) == said(alone) * 4
    assert [told(output) for output in outputs] == [told(output) for output in alone] * 4
    assert (short.stats.requests, short.stats.chunks_reused) == (before[0] + 12, before[1] + 24)


def test_statistics_are_of_the_first_time(short: BlendEngine) -> None:
    """The chunks leave the store, and the request is preempted: it goes on with rows computed in full."""
    texts = [fresh(), fresh()]
    keys = [chunk.key for chunk in short.encode(texts)]
    wanted = BlendPrompt(SYSTEM, *map(Chunk, texts), QUESTION)
    [alone] = short.generate(wanted, greedy(300), policy="full")
    forget_blocks(short)
    with watched(short) as seen:
        [ticket] = hand_in(short, [wanted], greedy(300), [{"policy": "full"}])
        next(iter(ticket))
        assert all(map(short.store.delete, keys))
        scheduler = short._start().call(lambda vllm: vllm.engine_core.engine_core.scheduler)
        assert short._start().call(lambda _: scheduler.reset_prefix_cache(reset_running_requests=True))
        output = short._last(ticket)
    assert [job.resumed for job in seen.jobs] == [False, True]
    assert (output.token_ids, told(output)) == (alone.token_ids, told(alone))


def test_a_resumed_pass_that_fails_is_told(short: BlendEngine) -> None:
    """Half of the statistics would be wrong: the answer was begun with stored chunks and ended without."""
    wanted = filled(short, [SYSTEM, Chunk(PASSAGES[0]), QUESTION], 3 * BLOCK - 4)
    alone = short.generate(wanted, greedy(40), policy="full", cache_salt=fresh())[0].token_ids
    with watched(short, fail=lambda job: job.resumed) as seen:
        outputs = together(short, [wanted] * 12, greedy(40), salted(*[{"policy": "full"}] * 12))
    again = [job for job in seen.jobs if job.resumed]
    failed = [output for output in outputs if output.stats.failure]
    assert len(failed) == len({job.request_id for job in again}) > 0
    assert said(outputs) == [alone] * 12
    assert {chunk.reason for output in failed for chunk in output.stats.chunks} == {"pass failed"}


def test_aborted_requests_leave_nothing(short: BlendEngine) -> None:
    def rest(vllm: Any) -> tuple[int, int]:
        connector, scheduler = scheduler_connector(vllm), vllm.engine_core.engine_core.scheduler
        assert scheduler.reset_prefix_cache()
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        side = connector.scheduler
        return sum(map(len, (side._plans, side._jobs, side._loading, side._blocks_loading, side._reports))), free

    short.flush()
    before = short._start().call(rest)
    salt = fresh()
    expected = short.generate(prompt(1, 2), greedy(8), policy="full", cache_salt=salt)[0].token_ids
    with held(short):
        tickets = hand_in(short, [prompt(1, 2)] * 6, greedy(8), salted(*[{"policy": "full"}] * 6))
        tickets[0].abort()
        tickets[3].abort()
    next(iter(tickets[1]))  # it is blended and has its first token
    tickets[1].abort()
    assert said([short._last(tickets[number]) for number in (2, 4, 5)]) == [expected] * 3
    short.flush()
    assert short._start().call(rest) == before == (0, 27)


def test_several_samples_are_blended_once(short: BlendEngine) -> None:
    """With top_k=1 each sample is the greedy answer."""
    [greedily] = short.generate(prompt(0, 1), greedy(8), policy="full", cache_salt=fresh())
    before = short.stats.requests, short.stats.chunks_reused, short.stats.chunks_prefix_cached
    with watched(short) as seen:
        [output] = short.generate(prompt(0, 1), SamplingParams(n=3, top_k=1, max_tokens=8, ignore_eos=True),
                                  policy="full", cache_salt=fresh())
    assert len(seen.jobs) == 1
    assert [list(sample.token_ids) for sample in output.outputs] == [greedily.token_ids] * 3
    assert told(output) == told(greedily)
    after = short.stats.requests, short.stats.chunks_reused, short.stats.chunks_prefix_cached
    assert after == (before[0] + 1, before[1] + 2, before[2]), "counted as one request, which was blended"


STRUCTURED = {
    "choice": StructuredOutputsParams(choice=["nobody", "Maria Okafor", "Alan Marsh"]),
    "json": StructuredOutputsParams(json={
        "type": "object", "additionalProperties": False, "required": ["name", "born"],
        "properties": {"name": {"enum": ["Maria", "Alan"]},
                       "born": {"type": "integer", "minimum": 1900, "maximum": 2000}}}),
}


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_output(short: BlendEngine, kind: str) -> None:
    params = greedy(60, structured_outputs=STRUCTURED[kind], ignore_eos=False)
    for output in assert_full_equals_plain(short, [prompt(0, 1), prompt(4), prompt(3, 2)], params):
        if kind == "choice":
            assert output.text in STRUCTURED[kind].choice
        else:
            assert json.loads(output.text).keys() == {"name", "born"}


@pytest.mark.parametrize("more", [
    {"stop": ["the"]}, {"min_tokens": 12, "ignore_eos": False, "logit_bias": {1: 50.0}}, {"bad_words": ["the", " a"]},
    {"presence_penalty": 1.0, "repetition_penalty": 1.3}, {"allowed_token_ids": list(range(90, 99))},
], ids=lambda more: next(iter(more)))
def test_what_is_asked_of_the_answer(short: BlendEngine, more: dict[str, Any]) -> None:
    assert_full_equals_plain(short, [prompt(0, 1), prompt(4), prompt(3, 2)], greedy(24, **more))


def test_prompts_at_the_edge(short: BlendEngine) -> None:
    """Nothing but a chunk, nothing but a token, empty chunks, as long as can be."""
    a, b = map(Chunk, PASSAGES[:2])
    prompts: list[Any] = [
        BlendPrompt(a), BlendPrompt(a, a), BlendPrompt(a, b, a, "?"), "x", BlendPrompt(Chunk("x")),
        BlendPrompt(Chunk(""), a, Chunk(""), "", Chunk("")), BlendPrompt(a, Chunk("x")),
        filled(short, [SYSTEM, a, b, a, b, QUESTION], LENGTH - 1)]
    outputs = assert_full_equals_plain(short, prompts, greedy(8))
    assert [output.stats.chunks_reused for output in outputs] == [1, 2, 3, 0, 0, 1, 1, 4]
    assert (len(outputs[-1].prompt_token_ids), len(outputs[-1].token_ids)) == (LENGTH - 1, 1)
    query = together(short, prompts, greedy(8), salted(*[{}] * len(prompts)))
    assert {output.stats.failure for output in query} == {""}


def test_a_hundred_chunks_of_the_least_length(short: BlendEngine) -> None:
    texts = [f"{number} stones and walls" for number in range(2000)]
    texts = [text for text in texts if len(short.tokens.chunk_ids(text)) == SHORTEST - 1][:100]
    assert {chunk.key for chunk in short.encode(texts)} == {""}, "too short by one token"
    texts = [text + "." for text in texts]
    assert {chunk.tokens for chunk in short.encode(texts)} == {SHORTEST}
    many = BlendPrompt("Read. ", *map(Chunk, texts), "How many?")
    [output] = assert_full_equals_plain(short, [many], greedy(8))
    assert output.stats.chunks_reused == 100
    [query] = short.generate(many, greedy(8), cache_salt=fresh())
    assert (query.stats.chunks_reused, query.stats.failure) == (100, "")
    assert query.stats.rows < 0.5


def test_without_prefix_caching_or_chunked_prefill_and_with_priorities(make: Make) -> None:
    engine = make(scheduling_policy="priority", enable_prefix_caching=False, enable_chunked_prefill=False,
                  max_num_batched_tokens=LENGTH)
    wanted = filled(engine, [SYSTEM, Chunk(PASSAGES[0]), "\n\n", Chunk(PASSAGES[1]), QUESTION], 3 * BLOCK - 4)
    [blended] = assert_full_equals_plain(engine, [wanted], greedy(24))
    preempted = counted(engine, "num_preemptions")
    [(ids, params)] = engine._running.make([wanted], [greedy(24)], RequestOptions(policy="full"))
    with watched(engine) as seen:
        with held(engine):
            tickets = [engine._start().submit(ids, params, priority=priority) for priority in range(12, 0, -1)]
        outputs = [engine._last(ticket) for ticket in tickets]
    assert counted(engine, "num_preemptions") > preempted
    assert len({job.request_id for job in seen.jobs}) == 12, "the same prompt finds nothing in a cache"
    assert said(outputs) == [blended.token_ids] * 12
    assert [told(output) for output in outputs] == [told(blended)] * 12
    order = [job.request_id.split("-")[1] for job in seen.jobs if not job.resumed]
    assert order == [ticket.request_id.split("-")[1] for ticket in reversed(tickets)], "the most urgent first"


def test_speculation_by_n_grams(make: Make) -> None:
    """Nine tokens to choose from: the answers repeat themselves, and drafts are accepted."""
    engine = make(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
                  async_scheduling=False)
    accepted = counted(engine, "spec_decode_num_accepted_tokens")
    params = greedy(48, allowed_token_ids=list(range(90, 99)))
    assert_full_equals_plain(engine, [prompt(0, 1), prompt(4), prompt(3, 2)], params)
    assert counted(engine, "spec_decode_num_accepted_tokens") > accepted
    query = together(engine, [prompt(0, 1), prompt(4)], params, salted({}, {}))
    assert [output.stats.chunks_reused for output in query] == [2, 1]
    assert {len(output.token_ids) for output in query} == {48}


def test_one_request_at_a_time_after_an_engine_that_speculated(make: Make) -> None:
    """N-grams bring numba and llvmlite along, and vLLM for the CPU would stumble over that when it starts again."""
    import llvmlite.binding  # noqa: F401

    engine = make(max_num_seqs=1, async_scheduling=True)  # which vLLM turns off on the CPU
    with watched(engine) as seen:
        assert_full_equals_plain(engine, [prompt(0, 1), prompt(4), prompt(3, 2)], greedy(8))
    assert len(seen.jobs) == 3


def test_a_prompt_always_fits_the_cache(engine_pool: Any, folder: Path) -> None:
    """vLLM sees to it: it does not start with a cache for less than max_model_len."""
    engine_pool.close()
    with pytest.raises(ModelError, match="KV cache"):
        BlendEngine(str(folder), **SETTINGS | {"kv_cache_memory_bytes": 4 * BLOCK_BYTES}).generate("x")


@pytest.mark.parametrize(("settings", "what"), [
    ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
     r"drafts .*\(speculative method draft_model\): use the method ngram"),
    ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "context parallel: use tensor_parallel_size"),
    ({"pipeline_parallel_size": 2}, "pipeline parallel: set pipeline_parallel_size=1"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_no_engine_can_do_is_refused(engine_pool: Any, folder: Path, settings: dict[str, Any], what: str) -> None:
    engine_pool.close()
    if drafts := settings.get("speculative_config"):
        drafts["model"] = str(folder)
    with pytest.raises(ModelError, match=what):
        BlendEngine(str(folder), **SETTINGS, **settings).generate("x")


def test_replicas_of_a_mixture_of_experts_are_refused(engine_pool: Any, tmp_path: Path) -> None:
    engine_pool.close()
    experts = build(named("Qwen3-MoE"), tmp_path / "model")
    with pytest.raises(ModelError, match="data parallel with a mixture of experts: set data_parallel_size=1"):
        BlendEngine(str(experts), **SETTINGS, data_parallel_size=2).generate("x")
