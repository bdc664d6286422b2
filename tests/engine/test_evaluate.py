"""An evaluation by a real engine: what is measured is what its name says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blendrag import BlendEngine, SamplingParams
from blendrag.evaluate import PLAIN, FollowUp, Question, evaluate, settings_of, summarise
from blendrag.evaluate.ask import expected_along, request
from blendrag.evaluate.blendmap import draw, map_prompt
from blendrag.evaluate.metrics import Distribution, divergence
from blendrag.evaluate.prompts import build_prompt
from blendrag.evaluate.turns import ANEW, CONTINUED, measure_turns
from blendrag.policies import NoRecompute
from tests.engine.texts import PASSAGES

QUESTION = Question("Who chairs the water committee of the town where the cheese is sold?",
                    tuple(f"{PASSAGES[number]}\n\n" for number in (1, 3)), ("Maria Okafor",))


def test_an_evaluation_and_its_map(engine: BlendEngine) -> None:
    too_long = Question("Why?", (PASSAGES[0] * 40,), line=2)
    settings = settings_of("default,full", [], engine.config)
    found = evaluate(engine, [QUESTION, too_long], settings, answer_tokens=4)
    assert found.questions == [QUESTION]
    assert [failure.question for failure in found.failures] == [too_long]
    assert "raise max_model_len" in found.failures[0].reason
    plain, default, full = summarise(found)
    assert (plain.rows, plain.kl, plain.same) == (1, 0, 1)
    assert (full.kl, full.kl16, full.top1, full.same) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5), 1, 1)
    assert full.rows == pytest.approx(1)
    assert 0 < (default.rows or 0) < 0.8
    assert (default.kl or 0) > 1e-5 < (default.kl16 or 0)
    assert all(summary.ttft_s and summary.f1 is not None for summary in (plain, default, full))
    mapped = map_prompt(engine, found)
    assert mapped is not None
    assert mapped.stats.map is not None
    tokens, told = mapped.stats.prompt_tokens, mapped.stats.map
    assert len(told.scores) == len(told.stored) == len(told.computed) == len(mapped.pieces) == tokens
    assert sum(a and b for a, b in zip(told.stored, told.computed, strict=True)) == mapped.stats.recomputed_tokens > 0
    assert sum(told.stored) == mapped.stats.recomputed_tokens + mapped.stats.reused_tokens
    approximate = [token for chunk in mapped.stats.chunks if not chunk.exact
                   for token in range(chunk.start, chunk.start + chunk.tokens)]
    assert [token for token, score in enumerate(told.scores) if score is not None] == approximate
    assert "".join(mapped.pieces) == build_prompt(engine.tokenizer, QUESTION).text
    assert draw(mapped).count('class="chunk"') == 2


def test_chunks_that_the_store_cannot_hold_are_not_measured(engine: BlendEngine,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be computed, and look as good as a full prefill."""
    question = Question("Why?", tuple(f"{n} {text}\n\n" for n, text in enumerate(PASSAGES[:2])))
    monkeypatch.setattr(engine.store._ram, "budget", 2**20)
    found = evaluate(engine, [question], settings_of("none", [], engine.config), answer_tokens=1)
    assert "of its 2 chunks do not fit the store beside the others: raise ram_bytes" in found.failures[0].reason


def test_a_chunk_too_short_to_store_is_computed_like_any_text(engine: BlendEngine) -> None:
    question = Question("Why?", (*QUESTION.chunks, "Yes.\n\n"))
    found = evaluate(engine, [question], settings_of("default", [], engine.config), default=NoRecompute(),
                     answer_tokens=1)
    assert (found.questions, found.failures) == ([question], [])
    assert found.settings[1].policy == NoRecompute()


def test_answers_can_be_forced_and_their_divergence_is_exact(engine: BlendEngine) -> None:
    prompt = build_prompt(engine.tokenizer, QUESTION)
    engine.encode(QUESTION.chunks, prefix=prompt)
    [none] = settings_of("none", [], engine.config)
    forced = engine.tokenizer.encode("Maria Okafor, of course", add_special_tokens=False)[:3]
    few = [expected_along(engine, prompt, setting, forced).places for setting in (PLAIN, none)]
    assert [len(places) for places in few] == [3, 3]

    def everything(setting: object) -> Distribution:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        found = request(engine, prompt, setting, params).outputs[0].logprobs[0]  # type: ignore[arg-type]
        ids = sorted(found)
        return Distribution(np.array(ids), np.array([found[token].logprob for token in ids]))

    exact = divergence(everything(PLAIN), everything(none))
    assert exact > 1e-3
    assert 0.99 * exact <= divergence(few[0][0], few[1][0]) <= exact, "the likeliest tokens are enough"
    # What is forced comes next: the second place is what a prompt that ends in the first token expects.
    behind = type(prompt)(*prompt.parts, engine.tokenizer.decode(forced[:1]), add_special_tokens=False)
    following = request(engine, behind, PLAIN, SamplingParams(temperature=0, max_tokens=1)).token_ids
    assert few[0][1].likeliest == following[0]
    assert request(engine, prompt, none, SamplingParams(max_tokens=1)).stats.map is None, "it was not asked for"


def test_later_turns_see_the_same_tokens_in_every_arm(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    question = replace(QUESTION, follow_ups=(FollowUp("What did she propose?", ("a reservoir",)), FollowUp("Why?")))
    generate, reset = engine.generate, engine.reset_prefix_cache
    events: list[Any] = []  # None where the prefix cache was emptied, else whether to blend, and the prompt's ids

    def spied(prompt: Any, params: Any, **how: Any) -> Any:
        outputs = generate(prompt, params, **how)
        events.append((how["blend"] is not False, tuple(outputs[0].prompt_token_ids)))
        return outputs

    monkeypatch.setattr(engine, "generate", spied)
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: events.append(None) or reset())
    turns = measure_turns(engine, question, settings_of("full", [], engine.config), 3, "Maria Okafor")
    [first, second, third] = dict.fromkeys(ids for event in events if event for ids in event[1:] if event[0])
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    plain = [None, (False, second)] * 2 + [None, (False, third)] * 2
    go_on = [None, (True, first), *[(True, second)] * 3, *[(True, third)] * 2]
    start_over = [None, (True, second)] * 2 + [None, (True, third)] * 2
    assert events == plain + go_on + start_over
    assert [turn.number for turn in turns] == [2, 3]
    assert [turn.previous_answer for turn in turns] == ["Maria Okafor", turns[0].plain.text]
    for turn in turns:
        assert (turn.plain.kl, turn.plain.cached, turn.arms[ANEW]["full"].cached) == (0, 0, 0)
        for arm in (CONTINUED, ANEW):
            outcome = turn.arms[arm]["full"]
            assert (outcome.kl, outcome.kl16, outcome.same) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5),
                                                                True)
            assert (outcome.f1 is None) == (turn.number == 3)
