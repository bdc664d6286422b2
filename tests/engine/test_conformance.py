"""With all rows recomputed, a blend pass is a full prefill: it must equal plain vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendEngine, BlendOutput, BlendPrompt, Chunk, SamplingParams
from blendrag.errors import ModelError
from blendrag.store.keys import NEUTRAL
from tests.engine.families import LENGTH, REFUSED, WORKING, Family, build, named
from tests.engine.placement import assert_placed_keys_are_fresh_keys
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM, layouts, short_layouts
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


def store_as_it_stands(ids: list[int], spans: Sequence[tuple[int, int]]) -> None:
    """Files chunks as their neutral variants, but with the KV that a full prefill of this very prompt gives them."""
    encoder: Any = get_kv_transfer_group().encoder
    for start, end in spans:
        chunk = ids[start:end]
        [(key, _)] = encoder.encode([chunk], ids[:start], neutral=False)
        [entry] = encoder.entries.get([key])
        neutral = encoder.entries.key(NEUTRAL, chunk)
        for known in (key, neutral):
            encoder.entries._store.delete(known)
        encoder.entries.put(neutral, entry, NEUTRAL, chunk)


def check_some_rows(engine: BlendEngine, tolerance: float) -> None:
    """Where the stored KV is what a full prefill computes, it must not matter which rows are computed again."""
    prompt = BlendPrompt(SYSTEM, Chunk(PASSAGES[4]), "\n\n", Chunk(PASSAGES[3]), "\n", Chunk(PASSAGES[5]), QUESTION)
    tokenized = engine.tokens(prompt)
    engine._start().call(lambda _: store_as_it_stands(tokenized.ids, tokenized.spans))
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    hows = [{"blend": False}, *SOME_ROWS]
    plain, *blended = together(engine, [prompt] * len(hows), first, [how | {"cache_salt": str(how)} for how in hows])
    assert_same(blended, [plain] * len(blended), tolerance)
    for output in blended:
        assert [(chunk.reused, chunk.exact) for chunk in output.stats.chunks] == [(True, False)] * 3
    tokens = sum(chunk.tokens for chunk in blended[0].stats.chunks)
    assert [output.stats.recomputed_tokens for output in blended] == [0, 15, *(
        round(how["ratio"] * tokens) for how in SOME_ROWS[2:])]


def family_engine(make: Callable[..., BlendEngine], family: Family, folder: Path) -> BlendEngine:
    arguments = {"dtype": family.dtype, "enforce_eager": True, "max_model_len": LENGTH, "max_logprobs": -1,
                 "kv_cache_memory_bytes": 2**26}
    return make(str(folder), **arguments | family.engine)


def by_name(families: Sequence[Family]) -> Any:
    return pytest.mark.parametrize("family", [pytest.param(family, id=family.slug) for family in families])


def test_full_equals_plain_vllm_on_smollm2(engine: BlendEngine) -> None:
    check(engine, layouts(), 24)


@by_name(WORKING)
def test_full_equals_plain_vllm_on_random_weights(family: Family, engine_pool: Any, tmp_path: Path) -> None:
    engine = family_engine(engine_pool.get, family, build(family, tmp_path / family.slug))
    check(engine, short_layouts(), 8)
    assert_placed_keys_are_fresh_keys(engine, PASSAGES[0], family.noise)
    check_some_rows(engine, family.noise)


def test_a_compiled_model_equals_plain_vllm_too(engine_pool: Any, tmp_path: Path) -> None:
    """As vLLM runs a model unless told otherwise, but for the code that would be generated from the traced graph."""
    traced = {"enforce_eager": False, "compilation_config": {"mode": CompilationMode.DYNAMO_TRACE_ONCE,
                                                             "backend": "eager"}}
    family = replace(named("Llama"), engine=traced)
    engine = family_engine(engine_pool.get, family, build(family, tmp_path / "compiled"))
    check(engine, short_layouts(), 8)
    check_some_rows(engine, family.noise)
    assert engine._start().call(lambda _: get_kv_transfer_group().blender.forward._compiled)


def test_the_check_of_placed_keys_notices_a_wrong_rotation(engine_pool: Any, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    family = named("Command R7B")  # owns a rotary embedding in layers that do not rotate; the probe is to find out
    folder = build(family, tmp_path / "model")
    engine_pool.close()
    monkeypatch.setattr("blendrag.runtime.worker.settle_rotations", lambda model: None)
    with family_engine(BlendEngine, family, folder) as engine, pytest.raises(AssertionError):
        assert_placed_keys_are_fresh_keys(engine, PASSAGES[0], family.noise)


@by_name(REFUSED)
def test_what_cannot_be_blended_is_refused_by_name(family: Family, engine_pool: Any, tmp_path: Path) -> None:
    engine_pool.close()
    with pytest.raises(ModelError, match=family.refusal), family_engine(
            BlendEngine, family, build(family, tmp_path / family.slug)) as engine:
        engine.encode(PASSAGES[:1])


def test_a_pass_longer_than_a_batch_is_cut_into_tiles(engine_pool: Any, tmp_path: Path) -> None:
    folder = build(named("Llama, llama3 rope"), tmp_path / "tiles")
    check(engine_pool.get(folder, dtype="float32", enforce_eager=True, max_model_len=1024, max_logprobs=-1,
                          kv_cache_memory_bytes=2**28, max_num_batched_tokens=128, max_num_seqs=16), layouts(), 24)
