"""What is reused, what is exact, and what the statistics say of it."""

from __future__ import annotations

import uuid

import pytest

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk, SamplingParams, mark_chunks
from blendrag.policies import POLICIES
from tests.engine.conformance import assert_same
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM

FIRST = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)


def prompt(*numbers: int) -> BlendPrompt:
    parts: list[str | Chunk] = [SYSTEM]
    for number in numbers:
        parts += [Chunk(PASSAGES[number]), "\n\n"]
    return BlendPrompt(*parts, QUESTION)


def one(engine: BlendEngine, what: BlendPrompt | str, **how: object) -> BlendOutput:
    [output] = engine.generate(what, FIRST, **how)  # type: ignore[arg-type]
    return output


def fresh(name: str = "") -> str:
    """A text nobody has stored, about as long as a passage."""
    return f"{name} {uuid.uuid4()} " + "is the number of a parcel that the post lost between Ormsby and the coast. " * 3


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"exact"}))
def test_every_policy_answers_and_says_what_it_did(engine: BlendEngine, policy: str) -> None:
    engine.encode(PASSAGES)
    output = one(engine, prompt(0, 1, 2, 3), policy=policy, cache_salt=fresh())
    stats = output.stats
    assert len(output.token_ids) == 1
    assert (stats.policy, stats.chunks_found, stats.chunks_reused, stats.chunks_missed) == (policy, 4, 4, 0)
    assert stats.reused_tokens + stats.recomputed_tokens >= sum(chunk.tokens for chunk in stats.chunks)
    assert 0 < stats.rows <= (1.0 if policy in ("full", "none", "first") else 1.3)
    assert stats.first_token_s >= stats.blend_s > 0
    assert (stats.score_s > 0) == (policy in ("cacheblend", "query"))
    assert (stats.recomputed_tokens == 0) == (policy == "none")
    assert stats.failure == ""


def test_a_first_chunk_behind_its_own_prefix_is_exact(engine: BlendEngine) -> None:
    engine.encode(PASSAGES[:1], prefix=SYSTEM)
    blended = one(engine, prompt(0), policy="none", cache_salt="exact")
    assert_same([blended], [one(engine, prompt(0), blend=False, cache_salt="plain")])
    assert [chunk.exact for chunk in blended.stats.chunks] == [True]
    assert blended.stats.reused_tokens > 60
    assert blended.stats.rows < 0.5


def test_a_prompt_can_stand_for_its_prefix(engine: BlendEngine) -> None:
    rendered = BlendPrompt("Passages: ", Chunk(fresh()), QUESTION, add_special_tokens=False)
    [chunk] = rendered.chunks
    assert [new.new for new in engine.encode([chunk], prefix=rendered)] == [True]
    assert engine.stored([chunk], prefix=rendered) == [True]
    assert [chunk.exact for chunk in one(engine, rendered, cache_salt=fresh()).stats.chunks] == [True]


def test_a_moved_chunk_is_approximate(engine: BlendEngine) -> None:
    engine.encode(PASSAGES[:2], prefix=SYSTEM)
    assert [chunk.exact for chunk in one(engine, prompt(1, 0), cache_salt=fresh()).stats.chunks] == [True, False]


def test_keys_land_where_they_belong(engine: BlendEngine) -> None:
    """Layer 0 keys depend on token and position alone, so a moved key deviates from a fresh one by rounding only."""
    engine.encode(PASSAGES)
    exact = one(engine, prompt(4, 2, 5, 0), blend=False, cache_salt=fresh())
    blended = one(engine, prompt(4, 2, 5, 0), policy="cacheblend", ratio=1.0, cache_salt=fresh())
    assert_same([blended], [exact])


def test_all_missing_is_a_full_prefill(engine: BlendEngine) -> None:
    missing = BlendPrompt(SYSTEM, Chunk(fresh("a")), Chunk(fresh("b")), QUESTION)
    output = one(engine, missing)
    assert_same([output], [one(engine, missing, blend=False, cache_salt="plain")])
    assert [chunk.reason for chunk in output.stats.chunks] == ["not stored", "not stored"]
    assert output.stats.reused_tokens == 0


def test_a_miss_in_between_does_not_stop_reuse(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    mixed = BlendPrompt(SYSTEM, Chunk(fresh()), Chunk(PASSAGES[0]), Chunk(fresh()), Chunk(PASSAGES[1]), QUESTION)
    stats = one(engine, mixed).stats
    assert [chunk.reason for chunk in stats.chunks] == ["not stored", "", "not stored", ""]
    assert stats.chunks_reused == 2


def test_short_chunks_are_computed(engine: BlendEngine) -> None:
    [encoded] = engine.encode(["Too short."])
    assert (encoded.key, encoded.new) == ("", False)
    engine.encode(PASSAGES[:1])
    stats = one(engine, BlendPrompt(SYSTEM, Chunk("Too short."), Chunk(PASSAGES[0]), QUESTION)).stats
    assert [chunk.reason for chunk in stats.chunks] == ["too short", ""]


def test_encoding_twice_computes_once(engine: BlendEngine) -> None:
    text = fresh()
    assert engine.stored([text]) == [False]
    assert [chunk.new for chunk in engine.encode([text, text])] == [True, False]
    assert [chunk.new for chunk in engine.encode([text])] == [False]
    assert engine.stored([text]) == [True]


def test_marked_text_is_the_same_prompt(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    text = SYSTEM + mark_chunks(PASSAGES[:3]) + QUESTION
    output = one(engine, text, cache_salt=fresh())
    assert output.stats.chunks_reused == 3
    assert engine.tokenizer.decode(output.prompt_token_ids) == SYSTEM + "\n\n".join(PASSAGES[:3]) + QUESTION


def test_what_is_forgotten_is_a_miss(engine: BlendEngine) -> None:
    text, other = fresh(), fresh()
    asked = BlendPrompt(SYSTEM, Chunk(text), Chunk(other), QUESTION)
    engine.encode([text, other])
    engine.encode([text], prefix=asked)
    assert one(engine, asked, cache_salt=fresh()).stats.chunks_reused == 2
    assert engine.forget([text, Chunk(text), "Too short.", fresh()]) == 1
    assert engine.stored([text, other]) == [False, True]
    assert [chunk.exact for chunk in one(engine, asked, cache_salt=fresh()).stats.chunks] == [True, False]
    assert engine.forget([text, other], prefix=asked) == 1
    assert [chunk.reason for chunk in one(engine, asked, cache_salt=fresh()).stats.chunks] == ["not stored", ""]
    assert engine.forget([]) == 0


def test_a_deleted_entry_is_a_miss(engine: BlendEngine) -> None:
    text = fresh()
    [encoded] = engine.encode([text])
    assert engine.store.delete(encoded.key)
    assert [c.reason for c in one(engine, BlendPrompt(SYSTEM, Chunk(text), QUESTION)).stats.chunks] == ["not stored"]


def test_the_engine_adds_up_its_requests(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    before = engine.stats.requests, engine.stats.chunks_reused, engine.stats.reused_tokens
    stats = one(engine, prompt(5, 4), cache_salt=fresh()).stats
    assert engine.stats.requests == before[0] + 1
    assert engine.stats.chunks_reused == before[1] + 2
    assert engine.stats.reused_tokens == before[2] + stats.reused_tokens
