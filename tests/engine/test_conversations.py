"""A prompt that begins as a blended one finds its blocks, and those of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk, SamplingParams
from tests.engine.test_reuse import fresh
from tests.engine.texts import PASSAGES, QUESTION
from tests.engine.together import forget_blocks, watched

BLOCK = 128
SHORT, LONG = (SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (4, 130))


class Conversation:
    """Turns over the same documents; each prompt is the one before, its answer and a further question."""

    def __init__(self, engine: BlendEngine, **how: Any) -> None:
        engine.encode(PASSAGES)
        self.engine = engine
        self.how = how
        self.parts: list[str | Chunk] = [fresh(), *map(Chunk, PASSAGES), QUESTION]

    def turn(self, params: SamplingParams = SHORT, **how: Any) -> BlendOutput:
        [output] = self.engine.generate(BlendPrompt(*self.parts), params, **self.how | how)
        self.parts += [output.text, "\n\nAnd what follows from that?"]
        return output


def common_blocks(before: BlendOutput, after: BlendOutput) -> int:
    """Tokens in the blocks that two turns share: the second tokenises the first's answer anew."""
    computed = [*before.prompt_token_ids, *before.token_ids[:-1]]  # the KV of the last token was never computed
    pairs = zip(computed, after.prompt_token_ids, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(computed)) // BLOCK * BLOCK


def test_later_turns_find_the_blended_blocks_and_those_of_the_answers(engine: BlendEngine) -> None:
    conversation = Conversation(engine)
    with watched(engine) as seen:
        first, second, third = (conversation.turn(params) for params in (LONG, SHORT, SHORT))
    assert len(seen.jobs) == 1, "vLLM computes what is new in later turns"
    assert [output.stats.continued for output in (first, second, third)] == [False, True, True]
    assert first.stats.chunks_reused == len(PASSAGES)
    for before, after in ((first, second), (second, third)):
        assert after.stats.prefix_cached_tokens == common_blocks(before, after)
        assert {chunk.reason for chunk in after.stats.chunks} == {"prefix cached"}


def test_another_question_about_the_same_documents_finds_them(engine: BlendEngine) -> None:
    conversation = Conversation(engine)
    conversation.turn()
    conversation.parts[-3:] = ["\nAnother question: who mended the wall, and when was that?"]
    second = conversation.turn()
    documents = second.stats.chunks[-1].start + second.stats.chunks[-1].tokens
    assert second.stats.continued
    assert second.stats.prefix_cached_tokens == documents // BLOCK * BLOCK


def test_exact_blocks_come_first(engine: BlendEngine) -> None:
    conversation = Conversation(engine)
    plain = conversation.turn(blend=False)
    second = conversation.turn()
    assert not second.stats.continued
    assert second.stats.prefix_cached_tokens == common_blocks(plain, second)


@pytest.mark.parametrize(("first", "second"), [
    ({"policy": "none"}, {"policy": "query"}),
    ({"ratio": 0.3}, {"ratio": 0.2}),
    ({"cache_salt": "one"}, {"cache_salt": "two"}),
    ({}, {"blend": False}),
], ids=["policy", "setting", "salt", "plain"])
def test_blocks_that_were_computed_in_another_way_are_not_used(
        engine: BlendEngine, first: dict[str, Any], second: dict[str, Any]) -> None:
    conversation = Conversation(engine)
    conversation.turn(**first)
    after = conversation.turn(**second)
    assert (after.stats.continued, after.stats.prefix_cached_tokens) == (False, 0)


def test_what_has_left_the_prefix_cache_is_blended_anew(engine: BlendEngine) -> None:
    conversation = Conversation(engine)
    conversation.turn()
    forget_blocks(engine)
    second = conversation.turn()
    assert (second.stats.continued, second.stats.chunks_reused) == (False, len(PASSAGES))


def test_the_answer_is_that_of_the_same_blocks(engine: BlendEngine) -> None:
    """Where all rows are computed a continued conversation is exact."""
    conversation, plain = Conversation(engine, policy="full"), Conversation(engine, blend=False)
    plain.parts = list(conversation.parts)
    blended = [conversation.turn().token_ids for _ in range(2)]
    forget_blocks(engine)
    assert [plain.turn().token_ids for _ in range(2)] == blended


def test_documents_of_a_later_turn_are_blended_behind_what_the_cache_holds(engine: BlendEngine) -> None:
    late = [fresh() * 4 for _ in range(3)]
    engine.encode(late)
    conversation = Conversation(engine, policy="none")
    first = conversation.turn()
    conversation.parts += [*map(Chunk, late), QUESTION]
    with watched(engine) as seen:
        second = conversation.turn()
    [job] = seen.jobs
    assert job.read == job.write_from == common_blocks(first, second) > 0
    for chunk in second.stats.chunks:
        assert chunk.reason == ("prefix cached" if chunk.start + chunk.tokens <= job.read else "")
    assert second.stats.chunks[-3].start > job.read
    assert (second.stats.continued, second.stats.failure) == (True, "")
    assert second.stats.rows < 0.4


def test_what_a_pass_reads_in_the_paged_cache_is_what_vllm_wrote_there(engine: BlendEngine) -> None:
    """All rows behind an exact beginning are computed over it."""
    conversation = Conversation(engine, policy="full", cache_salt=fresh())
    engine.encode(PASSAGES, cache_salt=conversation.how["cache_salt"])
    plain = Conversation(engine, blend=False, cache_salt=fresh())
    plain.parts = list(conversation.parts)
    beginning = BlendPrompt(*conversation.parts[:3])
    for one in (conversation, plain):
        [prefilled] = engine.generate(beginning, SHORT, blend=False, cache_salt=one.how["cache_salt"])
    with watched(engine) as seen:
        blended = conversation.turn(SamplingParams(temperature=0, max_tokens=8, logprobs=1))
    assert [job.read for job in seen.jobs] == [common_blocks(prefilled, blended)] != [0]
    exact = plain.turn(SamplingParams(temperature=0, max_tokens=8, logprobs=1))
    assert blended.token_ids == exact.token_ids
    chosen = [[step[token].logprob for token, step in zip(output.token_ids, output.outputs[0].logprobs, strict=True)]
              for output in (blended, exact)]
    assert chosen[0] == pytest.approx(chosen[1], abs=1e-3)
