"""Blended KV stays out of vLLM's exact prefix cache, and the same blended prompt still hits."""

from __future__ import annotations

from typing import Any

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk
from blendrag.runtime.compat import scheduler_connector
from tests.engine.test_conformance import assert_same
from tests.engine.test_reuse import fresh, one
from tests.engine.texts import PASSAGES, QUESTION
from tests.engine.together import counted, watched


def long_prompt(system: str) -> BlendPrompt:
    """Several blocks of the paged cache: an exact system prompt, then chunks."""
    return BlendPrompt(system, *map(Chunk, PASSAGES), QUESTION)


def cached(output: BlendOutput) -> tuple[int, int]:
    """Tokens that vLLM took from its own prefix cache, and the others that it says were not computed."""
    ours = output.stats.prefix_cached_tokens
    return ours, output.request_output.num_cached_tokens - ours


def test_the_same_blended_prompt_hits(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    prompt = long_prompt(fresh())
    first, second = one(engine, prompt), one(engine, prompt)
    assert first.stats.prefix_cached_tokens == 0
    assert second.stats.prefix_cached_tokens >= len(first.prompt_token_ids) - 256
    assert second.token_ids == first.token_ids
    assert {chunk.reason for chunk in second.stats.chunks} == {"prefix cached"}
    assert (second.stats.chunks_prefix_cached, second.stats.chunks_missed) == (len(PASSAGES), 0)


def test_blended_blocks_never_serve_an_exact_request(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    prompt = long_prompt(fresh())
    one(engine, prompt, policy="none")
    exact = one(engine, prompt, blend=False)
    assert exact.stats.prefix_cached_tokens == 0
    assert_same([exact], [one(engine, prompt, blend=False, cache_salt=fresh())])


def test_another_question_or_policy_does_not_hit(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    system = fresh()
    one(engine, long_prompt(system), policy="query")
    assert one(engine, long_prompt(system), policy="none").stats.prefix_cached_tokens == 0
    other = BlendPrompt(system, *map(Chunk, PASSAGES), "\nHow long does a wall stand?")
    assert one(engine, other, policy="query").stats.prefix_cached_tokens == 0


def test_a_shared_system_prompt_hits_both_ways(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    system = fresh() + "Everything in this prompt is shared between requests and stays as it is. " * 20
    plain = one(engine, BlendPrompt(system, "What is shared?"), blend=False)
    blended = one(engine, long_prompt(system))
    assert plain.stats.prefix_cached_tokens == 0
    assert blended.stats.prefix_cached_tokens >= 128
    assert blended.stats.chunks_reused == len(PASSAGES)
    assert one(engine, BlendPrompt(system, "Anything else?"), blend=False).stats.prefix_cached_tokens >= 128
    assert_same([one(engine, long_prompt(system), policy="full")],
                [one(engine, long_prompt(system), blend=False, cache_salt=fresh())])


def test_vllm_counts_the_same(engine: BlendEngine) -> None:
    """Its own statistics tell what its prefix cache held, and stored KV from rows that a pass computed."""
    engine.encode(PASSAGES)
    names = "prefix_cache_hits", "prompt_tokens_cached"

    def counts(prompt: BlendPrompt, **how: Any) -> tuple[BlendOutput, list[int]]:
        before = [counted(engine, name) for name in names]
        output = one(engine, prompt, **how)
        found = [counted(engine, name) - count for name, count in zip(names, before, strict=True)]
        assert found == [output.stats.prefix_cached_tokens, output.request_output.num_cached_tokens]
        return output, found

    prompt = long_prompt(fresh())
    first, found = counts(prompt)
    tokens = len(first.prompt_token_ids)
    assert 0 < first.stats.reused_tokens < tokens - 1
    assert found == [0, first.stats.reused_tokens]
    full_blocks = (tokens - 1) // 128 * 128
    assert counts(prompt)[1] == [full_blocks, full_blocks]
    assert counts(prompt, blend=False)[1] == [0, 0]
    assert counts(prompt, blend=False)[1] == [full_blocks, full_blocks]


def test_chunks_that_were_found_by_their_tokens_stay_out_too(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    text = fresh() + "\n\n" + "\n\n".join(PASSAGES) + QUESTION
    found, again = one(engine, text), one(engine, text)
    assert found.stats.chunks_reused == len(PASSAGES)
    assert cached(found)[0] == 0
    assert cached(again)[0] >= len(found.prompt_token_ids) - 256
    exact = one(engine, text, blend=False)
    assert cached(exact) == (0, 0)
    assert_same([exact], [one(engine, text, blend=False, cache_salt=fresh())])
    assert cached(one(engine, text))[0] == cached(again)[0], "nor does the exact prompt serve the blended one"


def test_a_chunk_that_is_exact_is_shared_with_plain_requests(engine: BlendEngine) -> None:
    system, chunk = fresh(), fresh() + PASSAGES[0] + PASSAGES[1]
    engine.encode([chunk], prefix=system)
    engine.encode(PASSAGES)
    blended = one(engine, BlendPrompt(system, Chunk(chunk), *map(Chunk, PASSAGES), QUESTION))
    exact = [c.start + c.tokens for c in blended.stats.chunks if c.exact]
    assert [end >= 256 for end in exact] == [True]
    plain = one(engine, BlendPrompt(system, Chunk(chunk), QUESTION), blend=False)
    assert cached(plain) == (exact[0] // 128 * 128, 0)
    assert_same([plain], [one(engine, BlendPrompt(system, Chunk(chunk), QUESTION), blend=False, cache_salt=fresh())])


def test_cache_salts_keep_blended_prompts_apart(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    prompt, salts = long_prompt(fresh()), (fresh(), fresh())
    assert [cached(one(engine, prompt, cache_salt=salt))[0] for salt in salts] == [0, 0]
    assert all(cached(one(engine, prompt, cache_salt=salt))[0] for salt in salts)


def test_a_prompt_of_which_the_cache_lost_its_last_blocks_is_blended_again(engine: BlendEngine) -> None:
    """As a full cache loses them: the last blocks go first.  What the first ones hold is not written again."""
    engine.encode(PASSAGES)
    prompt = long_prompt(fresh())
    with watched(engine) as seen:
        first = one(engine, prompt)
        lost = set(seen.jobs[0].block_ids[0][2:])
        engine._start().call(lambda vllm: scheduler_connector(vllm)._block_pool.evict_blocks(lost))
        second = one(engine, prompt)
    assert [job.write_from for job in seen.jobs] == [0, 256]
    assert_same([second], [first])
    assert second.stats.prefix_cached_tokens == 256
    assert second.request_output.num_cached_tokens == second.stats.reused_tokens == first.stats.reused_tokens
    assert second.stats.chunks_reused == len(PASSAGES)
    assert cached(one(engine, prompt))[1] == 0
