"""The exact policy: stored KV where nothing changes by it, a full prefill everywhere else."""

from __future__ import annotations

from blendrag import BlendEngine, BlendPrompt, Chunk
from tests.engine.conformance import assert_same
from tests.engine.test_reuse import fresh, one
from tests.engine.texts import PASSAGES, QUESTION


def of(prefix: str, *numbers: int) -> BlendPrompt:
    return BlendPrompt(prefix, *(part for number in numbers for part in (Chunk(PASSAGES[number]), "\n\n")), QUESTION)


def test_only_what_is_exact_is_reused(engine: BlendEngine) -> None:
    prefix = fresh() + "Answer from these passages. " * 5
    engine.encode(PASSAGES, prefix=prefix)
    found = one(engine, of(prefix, 1, 0, 2), policy="exact")
    assert [chunk.reused for chunk in found.stats.chunks] == [True, False, False]
    assert {chunk.reason for chunk in found.stats.chunks[1:]} == {"approximate"}
    assert found.stats.recomputed_tokens == 0
    assert found.stats.reused_tokens == found.stats.chunks[0].start + found.stats.chunks[0].tokens
    assert_same([found], [one(engine, of(prefix, 1, 0, 2), blend=False, cache_salt=fresh())])


def test_its_blocks_serve_plain_requests_and_theirs_serve_it(engine: BlendEngine) -> None:
    prefix = fresh() + "Answer from these passages. " * 5
    engine.encode(PASSAGES, prefix=prefix)
    prompt = of(prefix, *range(len(PASSAGES)))
    one(engine, prompt, policy="exact")
    plain = one(engine, prompt, blend=False)
    assert plain.stats.prefix_cached_tokens >= len(plain.prompt_token_ids) - 129
    again = one(engine, prompt, policy="exact")
    assert again.stats.prefix_cached_tokens == plain.stats.prefix_cached_tokens
    assert_same([again], [one(engine, prompt, blend=False, cache_salt=fresh())])


def test_chunks_that_may_change_places_are_found_in_the_prefix_cache(engine: BlendEngine) -> None:
    prefix = fresh()
    asked = [one(engine, of(prefix, *order), policy="exact", reorder=True)
             for order in ((0, 1, 2, 3, 4, 5), (5, 3, 4, 1, 2, 0))]
    assert asked[0].prompt_token_ids == asked[1].prompt_token_ids
    assert asked[1].stats.prefix_cached_tokens >= len(asked[1].prompt_token_ids) - 129
    assert asked[0].token_ids == asked[1].token_ids
    kept = one(engine, of(prefix, 5, 3, 4, 1, 2, 0), policy="exact")
    assert kept.prompt_token_ids != asked[1].prompt_token_ids
