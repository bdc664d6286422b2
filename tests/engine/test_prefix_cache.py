"""Blended KV stays out of vLLM's exact prefix cache, and the same blended prompt still hits."""

from __future__ import annotations

from blendrag import BlendEngine, BlendPrompt, Chunk
from tests.engine.test_conformance import assert_same
from tests.engine.test_reuse import fresh, one
from tests.engine.texts import PASSAGES, QUESTION


def long_prompt(system: str) -> BlendPrompt:
    """Several blocks of the paged cache: an exact system prompt, then chunks."""
    return BlendPrompt(system, *map(Chunk, PASSAGES), QUESTION)


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
