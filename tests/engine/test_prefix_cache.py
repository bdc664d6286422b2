"""Blended KV stays out of vLLM's exact prefix cache, and the same blended prompt still hits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk
from blendrag.policies import CacheBlend, First, NoRecompute, Policy, Query, Selective
from blendrag.runtime.compat import scheduler_connector
from tests.engine.conformance import assert_same
from tests.engine.test_reuse import FIRST, fresh, one
from tests.engine.texts import PASSAGES, QUESTION
from tests.engine.together import counted, hand_in, held, watched


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


def test_another_policy_does_not_hit(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    system = fresh()
    one(engine, long_prompt(system), policy="query")
    assert one(engine, long_prompt(system), policy="none").stats.prefix_cached_tokens == 0


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
    """As a full cache loses them: the last blocks go first.  What the first ones hold is read."""
    engine.encode(PASSAGES)
    prompt = long_prompt(fresh())
    with watched(engine) as seen:
        first = one(engine, prompt)
        lost = set(seen.jobs[0].block_ids[0][2:])
        engine._start().call(lambda vllm: scheduler_connector(vllm).scheduler.block_pool.evict_blocks(lost))
        second = one(engine, prompt)
    assert [(job.read, job.write_from) for job in seen.jobs] == [(0, 0), (256, 256)]
    assert (first.stats.chunks_reused, second.stats.prefix_cached_tokens) == (len(PASSAGES), 256)
    assert second.request_output.num_cached_tokens == 256 + second.stats.reused_tokens
    for chunk in second.stats.chunks:
        whole = chunk.start + chunk.tokens <= 256
        assert (chunk.reused, chunk.reason) == ((False, "prefix cached") if whole else (True, ""))
    assert cached(one(engine, prompt))[1] == 0


# What is exact and cached wins where it is cheaper.


def test_a_prompt_that_is_cached_and_exact_is_not_blended(engine: BlendEngine) -> None:
    """A second turn after `blend=False`: the first one's blocks are exact, and leave less than a pass would compute."""
    engine.encode(PASSAGES)
    system = fresh()
    first = one(engine, long_prompt(system), blend=False)
    turn = BlendPrompt(system, *map(Chunk, PASSAGES), QUESTION + "The council's.<|im_end|>\nAnd who sells it?")
    with watched(engine) as seen:
        second = one(engine, turn)
    assert not seen.jobs
    assert second.stats.prefix_cached_tokens >= len(first.prompt_token_ids) - 256
    assert_same([second], [one(engine, turn, blend=False, cache_salt=fresh())])
    last = second.stats.chunks[-1]
    held_by_vllm = last.start + last.tokens <= second.stats.prefix_cached_tokens
    assert [chunk.reason for chunk in second.stats.chunks] == [
        *["prefix cached"] * (len(PASSAGES) - 1), "prefix cached" if held_by_vllm else "not worth a pass"]


def test_a_short_exact_prefix_does_not_keep_a_prompt_from_being_blended(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    system = fresh() + "Everything in this prompt is shared between requests and stays as it is. " * 10
    one(engine, BlendPrompt(system, "What is shared?"), blend=False)
    blended = one(engine, long_prompt(system))
    assert blended.stats.prefix_cached_tokens >= 128
    assert blended.stats.chunks_reused == len(PASSAGES)


def test_exact_blocks_that_are_evicted_before_the_request_is_scheduled_cost_a_full_prefill(engine: BlendEngine) -> None:
    """Its hashes are plain by then: blended blocks under these names would serve exact requests."""
    engine.encode(PASSAGES)
    prompt = long_prompt(fresh())
    one(engine, prompt, blend=False)
    with watched(engine) as seen, held(engine):
        [ticket] = hand_in(engine, [prompt], FIRST, [{}])
        engine._start()._command(lambda vllm: scheduler_connector(vllm).scheduler.block_pool.reset_prefix_cache())
    output = engine._last(ticket)
    assert not seen.jobs
    assert (output.stats.prefix_cached_tokens, output.stats.chunks_reused, output.stats.rows) == (0, 0, 1.0)
    assert_same([output], [one(engine, prompt, blend=False, cache_salt=fresh())])


def test_exact_blocks_under_another_cache_salt_do_not_count(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    prompt = long_prompt(fresh())
    one(engine, prompt, blend=False, cache_salt=fresh())
    assert one(engine, prompt).stats.chunks_reused == len(PASSAGES)


# Blended blocks are shared exactly where their KV is the same.


def kv_of(engine: BlendEngine, prompt: BlendPrompt, blocks: int, policy: Policy) -> list[torch.Tensor]:
    """What a pass leaves in a prompt's first blocks, for each layer."""
    with watched(engine) as seen:
        one(engine, prompt, policy=policy, cache_salt=fresh())
    ids = torch.tensor(seen.jobs[0].block_ids[0][:blocks])

    def read(vllm: Any) -> list[torch.Tensor]:
        count = vllm.vllm_config.cache_config.num_gpu_blocks
        caches = [layer.attention.kv_cache for layer in get_kv_transfer_group().worker.blender.model.layers]
        return [cache.index_select(cache.shape.index(count), ids) for cache in caches]

    return engine._start().call(read)


@pytest.mark.parametrize(("policy", "shared"), [
    (NoRecompute(), "between question"), (First(), "between question"), (First(reach=64.0), "question"),
    (CacheBlend(), "question"), (CacheBlend(reach=64.0), "question"), (Query(), ""), (Query(reach=0.0), "")],
    ids=lambda value: value.label if isinstance(value, Policy) else "")
def test_blocks_are_shared_by_prompts_that_leave_the_same_kv_in_them(engine: BlendEngine, policy: Policy,
                                                                     shared: str) -> None:
    """Prompts that are equal up to somewhere: what follows may reach earlier KV, by a choice or by drift.

    None of them continues another one, or it would have that one's.
    """
    def forget_beginnings(vllm: Any) -> None:
        scheduler_connector(vllm).scheduler._beginnings.clear()

    chunks = Chunk("".join(PASSAGES[:3])), Chunk("".join(PASSAGES[3:]))
    engine.encode(chunks)
    system = fresh()

    def prompt(between: str, question: str) -> BlendPrompt:
        return BlendPrompt(system, chunks[0], f"\nNow for {between}.\n", chunks[1], f"\nWhat of {question}?")

    asked = prompt("bread", "goats")
    first = one(engine, asked, policy=policy).stats.chunks[0]
    blocks = (first.start + first.tokens) // 128
    kept = kv_of(engine, asked, blocks, policy)
    for name, other in (("question", prompt("bread", "walls")), ("between", prompt("stone", "goats"))):
        found = kv_of(engine, other, blocks, policy)
        same = all(torch.allclose(*pair, atol=1e-4) for pair in zip(kept, found, strict=True))
        engine._start().call(forget_beginnings)
        hit = one(engine, other, policy=policy).stats.prefix_cached_tokens >= 128 * blocks
        assert hit == (name in shared), name
        assert same or not hit, name
        if isinstance(policy, Selective) and policy.reach:
            assert same == hit, f"{name}: drift carries it into earlier KV"
