"""Batches, threads, streams, aborts, and input that cannot work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import BeamSearchParams

from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams
from blendrag.errors import ConfigError, EngineClosedError, ModelError, PromptError
from blendrag.runtime.compat import token_prompt
from tests.engine.conformance import assert_same
from tests.engine.policies import Broken, Last
from tests.engine.test_reuse import fresh, one, prompt
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM
from tests.engine.together import hand_in, held, watched

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def texts(outputs: list[Any]) -> list[str]:
    return [output.text for output in outputs]


def test_a_batch_of_blended_and_plain_prompts_equals_one_by_one(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    prompts: list[Any] = [prompt(0, 1), "Once upon a time", prompt(3, 2, 1), prompt(4), BlendPrompt(SYSTEM, QUESTION)]
    together = engine.generate(prompts, GREEDY, cache_salt=fresh())
    apart = [engine.generate(p, GREEDY, cache_salt=fresh())[0] for p in prompts]
    assert texts(together) == texts(apart)
    assert [o.stats.chunks_reused for o in together] == [2, 0, 3, 1, 0]


def test_threads_share_the_engine(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    expected = texts(engine.generate([prompt(n) for n in range(6)], GREEDY, cache_salt=fresh()))
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = engine.generate(prompt(number), GREEDY, cache_salt=fresh())[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(6)] == expected


def test_streaming_ends_with_the_whole_answer_and_its_statistics(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    outputs = list(engine.stream(prompt(0, 1), GREEDY, cache_salt=fresh()))
    assert len(outputs) > 3
    assert [o.finished for o in outputs[-2:]] == [False, True]
    assert outputs[-1].text == engine.generate(prompt(0, 1), GREEDY, cache_salt=fresh())[0].text
    assert outputs[-1].stats.chunks_reused == 2


def test_closing_a_stream_stops_the_request(engine: BlendEngine) -> None:
    stream = engine.stream(prompt(0), SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    stream.close()
    running = engine._start().call(lambda vllm: vllm.has_unfinished_requests())
    assert not running


def test_several_samples_of_one_prompt(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    [output] = engine.generate(prompt(0, 1), SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8))
    assert len(output.outputs) == 3
    assert output.stats.chunks_reused == 2


def test_all_samples_of_a_prompt_tell_of_the_one_that_was_blended(engine: BlendEngine) -> None:
    """Whichever ends first or last, in the step of the pass or later."""
    engine.encode(PASSAGES)
    for tokens in (1, 5):
        with held(engine):
            [ticket] = hand_in(engine, [prompt(0, 1)], SamplingParams(n=3, max_tokens=tokens, ignore_eos=True),
                               [{"cache_salt": fresh()}])
        engine._last(ticket)
        statistics = [params["blend"] for params in ticket.progress.handed_out]
        assert [told["chunks_reused"] for told in statistics] == [2, 2, 2]
        assert statistics[0]["blend_s"] > 0
        assert statistics == [statistics[0]] * 3


def test_each_prompt_has_its_own_sampling_params(engine: BlendEngine) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = engine.generate([prompt(0), prompt(1)], params)
    assert [len(o.token_ids) for o in outputs] == [2, 5]
    assert params[0].extra_args is None, "the caller's object is left alone"
    with pytest.raises(PromptError, match="give one, or one for each"):
        engine.generate([prompt(0)], params)


def test_prompt_logprobs_are_given_without_blending(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    [output] = engine.generate(prompt(0), SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.request_output.prompt_logprobs
    assert [chunk.reason for chunk in output.stats.chunks] == ["prompt logprobs asked for"]


def test_a_prompt_over_the_limit_names_the_remedy(engine: BlendEngine) -> None:
    with pytest.raises(PromptError, match="retrieve fewer or shorter chunks, or raise max_model_len"):
        engine.generate(BlendPrompt(Chunk(PASSAGES[0] * 40)))
    with pytest.raises(PromptError, match="split it, or raise max_model_len"):
        engine.encode([PASSAGES[0] * 40])


def test_input_that_is_no_prompt(engine: BlendEngine) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.generate("")
    with pytest.raises(PromptError, match="a prompt is a str or a BlendPrompt"):
        engine.generate([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="there is no policy 'magic'"):
        engine.generate("x", policy="magic")
    with pytest.raises(ConfigError, match="takes SamplingParams, not BeamSearchParams"):
        engine.generate("x", BeamSearchParams(beam_width=2, max_tokens=2))
    assert engine.generate([]) == []


def test_a_step_of_beam_search_is_not_blended(engine: BlendEngine) -> None:
    """vLLM asks for each with parameters of its own, in which nothing is left of what the client said."""
    engine.encode(PASSAGES)
    ids = one(engine, prompt(0, 1), cache_salt=fresh()).prompt_token_ids
    step = SamplingParams(temperature=0, max_tokens=1, logprobs=4, detokenize=False, skip_clone=True)
    loop = engine._start()
    with watched(engine) as seen:
        found = [list(loop.submit(token_prompt(ids, fresh()), params))[-1]
                 for params in (step, SamplingParams(temperature=0, max_tokens=1, logprobs=4))]
    assert [job.request_id.split("-")[1] for job in seen.jobs] == [found[1].request_id.split("-")[1]]
    assert found[0].kv_transfer_params is None


# Policies of a user's own.


def test_a_policy_of_the_users_own(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    output = one(engine, prompt(0, 1, 2), policy=Last(tokens=5), cache_salt=fresh())
    assert (output.stats.policy, output.stats.chunks_reused, output.stats.recomputed_tokens) == ("last", 3, 15)
    assert one(engine, prompt(0, 1, 2), policy=Last(), tokens=7, cache_salt=fresh()).stats.recomputed_tokens == 21
    everything = one(engine, prompt(0, 1, 2), policy=Last(tokens=10_000), cache_salt=fresh())
    assert_same([everything], [one(engine, prompt(0, 1, 2), blend=False, cache_salt=fresh())])


def test_a_policy_that_fails_costs_a_full_prefill_and_says_why(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    output = one(engine, prompt(0, 1), policy=Broken(), cache_salt=fresh())
    assert "policy 'broken' selects with torch.float32" in output.stats.failure
    assert_same([output], [one(engine, prompt(0, 1), blend=False, cache_salt=fresh())])


def test_a_second_engine_is_refused_while_one_runs(engine: BlendEngine, shallow: Path) -> None:
    engine.generate("x", GREEDY)
    with pytest.raises(ModelError, match="close it first"):
        BlendEngine(str(shallow)).generate("x")


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    engine = BlendEngine(str(tmp_path))
    engine.close()
    with pytest.raises(EngineClosedError, match="make a new BlendEngine"):
        engine.generate("x")


def test_a_model_vllm_does_not_know(engine_pool: Any, tmp_path: Path) -> None:
    engine_pool.close()
    with pytest.raises(ModelError, match="check the model's path or name"):
        BlendEngine(str(tmp_path)).generate("x")
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    with pytest.raises(ModelError, match="check the model's path or name"):
        BlendEngine(str(tmp_path)).generate("x")


def test_a_store_that_cannot_be_opened_names_the_remedy(engine_pool: Any, shallow: Path, tmp_path: Path) -> None:
    engine_pool.close()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Exception, match="store_path"):
        BlendEngine(str(shallow), config=BlendConfig(store_path=tmp_path / "file")).generate("x")


def test_an_engine_that_was_refused_leaves_the_running_one_alone(engine: BlendEngine, shallow: Path) -> None:
    before = engine.generate("Once upon a time", GREEDY)[0].text
    refused: list[Exception] = []

    def start() -> None:
        try:
            BlendEngine(str(shallow)).generate("x")
        except ModelError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert engine.generate("Once upon a time", GREEDY)[0].text == before
