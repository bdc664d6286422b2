"""Passes that replay vLLM's CUDA graphs answer as passes without do.  Needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag import BlendEngine, BlendOutput, BlendPrompt, SamplingParams
from tests.engine.conformance import distribution
from tests.engine.texts import PASSAGES, SYSTEM, layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@pytest.fixture(scope="module")
def engine(engine_pool: Any, smollm2: Path) -> BlendEngine:
    engine: BlendEngine = engine_pool.get(smollm2, max_model_len=4096, max_logprobs=-1, gpu_memory_utilization=0.4)
    engine.encode(PASSAGES, prefix=SYSTEM)
    return engine


def forward_of(engine: BlendEngine) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return engine._start().call(lambda _: get_kv_transfer_group().worker.blender.forward)


def ask(engine: BlendEngine, prompt: BlendPrompt, policy: str) -> BlendOutput:
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=-1)
    [output] = engine.generate(prompt, params, policy=policy)
    assert output.stats.policy == policy
    assert not output.stats.failure
    return output


@pytest.mark.parametrize("policy", ["full", "query", "cacheblend", "none"])
def test_graphs_change_nothing(engine: BlendEngine, policy: str) -> None:
    forward = forward_of(engine)
    graphs = forward._graphs
    assert graphs.smallest(1000).rows == 1024
    try:
        for prompt in layouts()[:8]:
            forward._graphs = graphs
            with_graphs = ask(engine, prompt, policy)
            forward._graphs = None
            without = ask(engine, prompt, policy)
            assert with_graphs.token_ids == without.token_ids
            torch.testing.assert_close(distribution(with_graphs), distribution(without), atol=0.02, rtol=0)
    finally:
        forward._graphs = graphs
