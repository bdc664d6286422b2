"""What vLLM keeps or computes in a way that blending does not know is refused by name, before anything is blended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from blendrag.errors import ModelError
from blendrag.runtime.model.blend_model import refuse_by_cache
from blendrag.runtime.model.layer_rotations import LayerRotations
from blendrag.runtime.model.rotation import NoRotation

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
ORDINARY = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=64)


def cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def uniform(spec: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layers.0": ORDINARY[0], "layers.1": spec})


def test_full_attention_and_windows_are_taken() -> None:
    refuse_by_cache(cache(*ORDINARY))
    refuse_by_cache(cache(uniform(ORDINARY[0])))


@pytest.mark.parametrize(("spec", "message"), [
    (FullAttentionSpec(**SIZES, attention_chunk_size=64), "attention within chunks of a prompt"),
    (FullAttentionSpec(**SIZES, non_causal=True), "attention to later tokens"),
    (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64), "ChunkedLocalAttention caches")])
def test_other_attention_is_refused_alone_and_among_layers_of_one_size(spec: Any, message: str) -> None:
    for config in (cache(*ORDINARY, spec), cache(uniform(spec))):
        with pytest.raises(ModelError, match=f"{message}.*: use (a|another) model"):
            refuse_by_cache(config)


@pytest.fixture
def rotating(smollm2: Any) -> torch.nn.Module:
    """A model of one layer, whose rotary table has 2048 positions."""
    with set_current_vllm_config(VllmConfig(model_config=ModelConfig(str(smollm2), max_model_len=2048))):
        rotary = get_rope(64, 2048, True, {"rope_type": "default"}, dtype=torch.float32)
        layer = torch.nn.ModuleDict({"attn": torch.nn.Identity(), "rotary": rotary})
        return torch.nn.ModuleDict({"layer": layer})


def rotations_of(model: torch.nn.Module, length: int) -> list[Any]:
    facts = SimpleNamespace(max_model_len=length, dtype=torch.float32, hf_text_config=SimpleNamespace())
    config: Any = SimpleNamespace(model_config=facts)
    return list(LayerRotations(model, config).of("layer.attn", 64))


def test_a_rotary_table_must_reach_to_the_end_of_a_prompt(rotating: torch.nn.Module) -> None:
    first, *_, last = rotations_of(rotating, 2048)
    assert (len(first.cos), type(last)) == (2048, NoRotation)
    with pytest.raises(ModelError, match="2048 positions and max_model_len is 2049: set max_model_len to 2048 or less"):
        rotations_of(rotating, 2049)
