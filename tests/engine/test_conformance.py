"""With all rows recomputed, a blend pass is a full prefill: it must equal plain vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag import BlendEngine, BlendOutput, SamplingParams
from tests.engine.families import FAMILIES, build
from tests.engine.texts import PASSAGES, SYSTEM, layouts

TOLERANCE = 1e-3


def distribution(output: BlendOutput) -> torch.Tensor:
    """First-token log-probabilities over the whole vocabulary."""
    found = output.outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in sorted(found)])


def assert_same(blended: list[BlendOutput], plain: list[BlendOutput]) -> None:
    for ours, theirs in zip(blended, plain, strict=True):
        difference = (distribution(ours) - distribution(theirs)).abs().max().item()
        assert difference < TOLERANCE, ours.request_output.prompt_token_ids
        assert ours.token_ids == theirs.token_ids


def answers(engine: BlendEngine, **how: Any) -> list[BlendOutput]:
    """24 greedy tokens of each layout; the first token's whole distribution comes from a second run."""
    prompts = layouts()
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    first = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    longer = engine.generate(prompts, greedy, **how)
    for output, whole in zip(longer, engine.generate(prompts, first, **how), strict=True):
        output.outputs[0].logprobs = whole.outputs[0].logprobs
    return longer


def check(engine: BlendEngine) -> None:
    engine.encode(PASSAGES)
    engine.encode(PASSAGES[:3], prefix=SYSTEM)
    plain = answers(engine, blend=False, cache_salt="plain")
    blended = answers(engine, policy="full")
    assert_same(blended, plain)
    assert [output.stats.policy for output in blended] == ["full"] * len(plain)
    assert sum(output.stats.recomputed_tokens > 0 for output in blended) >= len(plain) - 1
    assert engine.stats.failures == 0


def test_full_equals_plain_vllm_on_smollm2(engine: BlendEngine) -> None:
    check(engine)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_full_equals_plain_vllm_on_random_weights(family: str, engine_pool: Any, smollm2: Path, tmp_path: Path) -> None:
    folder = build(family, tmp_path / family, smollm2)
    check(engine_pool.get(folder, dtype="float32", enforce_eager=True, max_model_len=2048, max_logprobs=-1,
                          kv_cache_memory_bytes=2**28))


def test_a_pass_longer_than_a_batch_is_cut_into_tiles(engine_pool: Any, smollm2: Path, tmp_path: Path) -> None:
    folder = build("llama3-rope", tmp_path / "tiles", smollm2)
    check(engine_pool.get(folder, dtype="float32", enforce_eager=True, max_model_len=2048, max_logprobs=-1,
                          kv_cache_memory_bytes=2**28, max_num_batched_tokens=128, max_num_seqs=16))
