"""What holds a model family to plain vLLM: with all rows recomputed, a blend pass is a full prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk, SamplingParams
from blendrag.runtime.planning.scope import scope_of
from blendrag.store.keys import NEUTRAL
from tests.engine.families import LENGTH, Family, random_weights
from tests.engine.placement import placement_errors
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM, short_layouts
from tests.engine.together import together

TOLERANCE = 1e-3
SOME_ROWS: list[dict[str, Any]] = [
    {"policy": "none"}, {"policy": "first", "tokens": 5}, {"policy": "cacheblend", "ratio": 0.3},
    {"policy": "cacheblend", "ratio": 0.8, "check_layers": [0]}, {"policy": "query", "ratio": 0.4}]


def distribution(output: BlendOutput) -> torch.Tensor:
    """First-token log-probabilities over the whole vocabulary."""
    found = output.outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in sorted(found)])


def assert_same(blended: list[BlendOutput], plain: list[BlendOutput], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(blended, plain, strict=True):
        difference = (distribution(ours) - distribution(theirs)).abs().max().item()
        assert difference < tolerance, ours.request_output.prompt_token_ids
        assert ours.token_ids == theirs.token_ids


def answers(engine: BlendEngine, prompts: list[BlendPrompt], tokens: int, **how: Any) -> list[BlendOutput]:
    """Greedy tokens of each prompt; the first token's whole distribution comes from a second run."""
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    longer = engine.generate(prompts, greedy, **how)
    for output, whole in zip(longer, engine.generate(prompts, first, **how), strict=True):
        output.outputs[0].logprobs = whole.outputs[0].logprobs
    return longer


def check(engine: BlendEngine, prompts: list[BlendPrompt], tokens: int) -> None:
    engine.encode(PASSAGES)
    engine.encode(PASSAGES[:3], prefix=SYSTEM)
    plain = answers(engine, prompts, tokens, blend=False, cache_salt="plain")
    blended = answers(engine, prompts, tokens, policy="full")
    assert_same(blended, plain)
    assert len({tuple(output.token_ids) for output in plain}) > len(prompts) / 2  # weights that say something
    assert [output.stats.policy for output in blended] == ["full"] * len(plain)
    assert sum(output.stats.recomputed_tokens > 0 for output in blended) >= len(plain) - 1
    assert engine.stats.failures == 0


def store_as_it_stands(scope: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> None:
    """Files chunks as their neutral variants, but with the KV that a full prefill of this very prompt gives them."""
    encoder: Any = get_kv_transfer_group().worker.populating.encoder
    for start, end in spans:
        chunk = ids[start:end]
        [(key, _)] = encoder.encode(scope, [chunk], ids[:start], neutral=False)
        [entry] = encoder.entries.get([key])
        neutral = encoder.entries.key(scope, NEUTRAL, chunk)
        for known in (key, neutral):
            encoder.entries._store.delete(known)
        encoder.entries.put(scope, neutral, entry, NEUTRAL, chunk)


def check_some_rows(engine: BlendEngine, tolerance: float) -> None:
    """Where the stored KV is what a full prefill computes, it must not matter which rows are computed again."""
    prompt = BlendPrompt(SYSTEM, Chunk(PASSAGES[4]), "\n\n", Chunk(PASSAGES[3]), "\n", Chunk(PASSAGES[5]), QUESTION)
    tokenized = engine.tokens(prompt)
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    hows = [how | {"cache_salt": str(how)} for how in ({"blend": False}, *SOME_ROWS)]
    for how in hows:  # each in a scope of its own, so that none finds another's blocks
        scope = scope_of(engine.config, str(how["cache_salt"]))
        engine._start().call(lambda _, scope=scope: store_as_it_stands(scope, tokenized.ids, tokenized.spans))
    plain, *blended = together(engine, [prompt] * len(hows), first, hows)
    assert_same(blended, [plain] * len(blended), tolerance)
    for output in blended:
        assert [(chunk.reused, chunk.exact) for chunk in output.stats.chunks] == [(True, False)] * 3
    tokens = sum(chunk.tokens for chunk in blended[0].stats.chunks)
    assert [output.stats.recomputed_tokens for output in blended] == [0, 15, *(
        round(how["ratio"] * tokens) for how in SOME_ROWS[2:])]


def family_engine(make: Callable[..., BlendEngine], family: Family, folder: Path) -> BlendEngine:
    """A started engine of a family's model."""
    arguments = {"dtype": family.dtype, "enforce_eager": True, "max_model_len": LENGTH, "max_logprobs": -1,
                 "kv_cache_memory_bytes": 2**26} | ({"load_format": "dummy"} if family.model_type else {})
    with random_weights():
        engine = make(str(folder), **arguments | family.engine)
        engine._start()
    return engine


def check_family(engine: BlendEngine, family: Family) -> float:
    """All that docs/models.md says of a family that works.

    Returns:
        How far placed keys and values are from fresh ones at most, relative to the largest of their layer.
    """
    check(engine, short_layouts(), 8)
    worst = max(max(layers) for layers in placement_errors(engine, PASSAGES[0]))
    assert worst < family.noise, worst
    check_some_rows(engine, family.noise)
    return worst
