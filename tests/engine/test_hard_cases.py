"""Prompts on which reuse of KV is known to fail elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk
from tests.engine.conformance import assert_same, distribution
from tests.engine.hard_cases import CASES, NEW_RULES, OLD_RULES
from tests.engine.test_reuse import FIRST
from tests.engine.texts import SYSTEM
from tests.engine.together import forget_blocks

GAINING = {"many short chunks": 0.7, "other languages": 0.7, "code": 0.7, "a long context": 0.7, "tables": 1.0}
"""Cases in which what is recomputed must bring the answer nearer to a full prefill's, even with 135M parameters: the
share of the KL that may be left."""


def pieces(case: str, *, marked: bool = True) -> Iterator[str | Chunk]:
    passages, question = CASES[case]
    yield SYSTEM
    for passage in passages:
        yield Chunk(passage) if marked else passage
        yield "\n\n"
    yield f"{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    return smollm2_engine


@pytest.fixture(scope="module")
def stored() -> set[str]:
    """Names of the cases whose passages were encoded."""
    return set()


@pytest.fixture
def cases(engine: BlendEngine, stored: set[str]) -> dict[str, BlendPrompt]:
    if not stored:
        engine.encode([passage for passages, _ in CASES.values() for passage in passages] + [OLD_RULES])
        stored |= CASES.keys()
    return {case: BlendPrompt(*pieces(case)) for case in CASES}


def kl(plain: BlendOutput, other: BlendOutput) -> float:
    expected = distribution(plain)
    return float((expected.exp() * (expected - distribution(other))).sum())


def test_recomputing_brings_the_answer_nearer_and_all_rows_reach_it(engine: BlendEngine,
                                                                    cases: dict[str, BlendPrompt]) -> None:
    hows = {"plain": {"blend": False}, "none": {"policy": "none"}, "default": {}, "full": {"policy": "full"}}
    found = {}
    for name, how in hows.items():
        forget_blocks(engine)
        outputs = engine.generate(list(cases.values()), FIRST, **how)
        found[name] = dict(zip(cases, outputs, strict=True))
    assert_same(list(found["full"].values()), list(found["plain"].values()))
    for case in cases:
        assert found["default"][case].stats.chunks_reused == len(CASES[case][0])
    far = {case: kl(found["plain"][case], found["none"][case]) for case in GAINING}
    near = {case: kl(found["plain"][case], found["default"][case]) for case in GAINING}
    assert [case for case, left in GAINING.items() if near[case] > left * far[case]] == [], (near, far)
    assert sum(near.values()) < 0.6 * sum(far.values())


@pytest.mark.parametrize("case", ["near duplicates", "an edited document", "many short chunks", "other languages"])
def test_each_text_is_found_as_itself_without_marks(engine: BlendEngine, cases: dict[str, BlendPrompt],
                                                    case: str) -> None:
    """Its near duplicates and older versions are stored, too."""
    text = BlendPrompt("".join(map(str, pieces(case, marked=False))))
    forget_blocks(engine)
    [output] = engine.generate(text, FIRST)
    tokens = engine.tokens
    reused = [output.prompt_token_ids[chunk.start : chunk.start + chunk.tokens] for chunk in output.stats.chunks
              if chunk.reused]
    for ids, passage in zip(reused, CASES[case][0], strict=True):
        # Where it meets its surroundings a chunk may have other tokens: those are computed.
        assert tokens.tokenizer.decode(ids).strip() in passage
        assert len(ids) >= len(tokens.chunk_ids(passage)) - 4


def test_an_edited_document_is_not_answered_from_its_old_version(engine: BlendEngine,
                                                                 cases: dict[str, BlendPrompt]) -> None:
    new = cases["an edited document"]
    old = BlendPrompt(*(Chunk(OLD_RULES) if part == Chunk(NEW_RULES) else part for part in new.parts))
    forget_blocks(engine)
    answers = [engine.generate(prompt, FIRST, policy="full")[0] for prompt in (new, old)]
    blended = []
    for prompt in (new, old):
        forget_blocks(engine)  # they begin alike, so the second would continue the first
        blended += engine.generate(prompt, FIRST)
    assert [output.stats.chunks_reused for output in blended] == [3, 3]
    assert (distribution(blended[0]) - distribution(blended[1])).abs().max() > 1e-3
    assert (distribution(answers[0]) - distribution(answers[1])).abs().max() > 1e-3
