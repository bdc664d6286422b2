"""An engine with LoRA adapters: requests with one are left to vLLM, all others are blended with the bare model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from blendrag import BlendEngine, SamplingParams
from tests.engine.families import COMMON, build, named
from tests.engine.test_reuse import fresh, prompt
from tests.engine.texts import PASSAGES, SYSTEM
from tests.engine.together import together

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
RANK = 8
SETTINGS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024,
                            "kv_cache_memory_bytes": 2**26}


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter as PEFT saves it, strong enough that every answer changes."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner = COMMON["hidden_size"], COMMON["intermediate_size"]
    heads = hidden // COMMON["num_attention_heads"] * COMMON["num_key_value_heads"]
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, heads),
              "self_attn.v_proj": (hidden, heads), "mlp.down_proj": (inner, hidden)}
    weights = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for name, (into, out) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(RANK, into, generator=random) * 0.2
            weights[f"{path}.lora_B.weight"] = torch.randn(out, RANK, generator=random) * 0.2
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
         "target_modules": [name.rpartition(".")[2] for name in shapes]}))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"adapter{seed}", seed, str(write_adapter(folder / str(seed), seed))) for seed in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(named("Llama"), tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture
def lora_engine(engine_pool: Any, folder: Path) -> BlendEngine:
    # One slot more than there are adapters: on the CPU, vLLM 0.32 gives rows without an adapter the last slot's.
    engine: BlendEngine = engine_pool.get(folder, **SETTINGS, enable_lora=True, max_lora_rank=RANK, max_loras=3)
    return engine


def test_a_batch_of_requests_with_and_without_adapters(lora_engine: BlendEngine, adapters: list[LoRARequest]) -> None:
    def plain(adapter: LoRARequest | None) -> list[int]:
        [output] = lora_engine.generate(prompt(1, 0), GREEDY, blend=False, cache_salt=fresh(), lora_request=adapter)
        return output.token_ids

    without, first, second = plain(None), *map(plain, adapters)
    assert len({tuple(without), tuple(first), tuple(second)}) == 3, "adapters that say something"
    hows: list[dict[str, Any]] = [{"lora_request": adapters[0]}, {"policy": "full"}, {"lora_request": adapters[1]},
                                  {"policy": "full"}, {"blend": False}]
    for how in hows:  # each in a scope of its own, so that none finds another's blocks
        how["cache_salt"] = fresh()
        lora_engine.encode(PASSAGES[:2], cache_salt=how["cache_salt"])
    outputs = together(lora_engine, [prompt(1, 0)] * 5, GREEDY, hows)
    assert [output.token_ids for output in outputs] == [first, without, second, without, without]
    assert [output.stats.chunks_reused for output in outputs] == [0, 2, 0, 2, 0]
    assert [output.stats.failure for output in outputs] == [""] * 5
    for number in (0, 2):
        assert {chunk.reason for chunk in outputs[number].stats.chunks} == {"LoRA request"}


def test_chunks_are_encoded_without_the_adapters_of_the_last_batch(
        lora_engine: BlendEngine, adapters: list[LoRARequest]) -> None:
    """An entry made right after a request with an adapter is the base model's: where it is exact, so is the answer."""
    lora_engine.generate(prompt(2), GREEDY, lora_request=adapters[0])
    salt = fresh()
    lora_engine.encode(PASSAGES[2:3], prefix=SYSTEM, cache_salt=salt)
    [blended] = lora_engine.generate(prompt(2), GREEDY, policy="none", cache_salt=salt)
    [plain] = lora_engine.generate(prompt(2), GREEDY, blend=False, cache_salt=fresh())
    assert [chunk.exact for chunk in blended.stats.chunks] == [True]
    assert blended.token_ids == plain.token_ids


def test_an_adapter_that_was_unloaded_does_no_harm(lora_engine: BlendEngine, adapters: list[LoRARequest]) -> None:
    lora_engine.generate(prompt(3), GREEDY, lora_request=adapters[0])
    assert lora_engine._start().call(lambda vllm: vllm.remove_lora(adapters[0].lora_int_id))
    [encoded] = lora_engine.encode([fresh()])
    assert encoded.new
    [output] = lora_engine.generate(prompt(3), GREEDY, policy="full", cache_salt=fresh())
    [plain] = lora_engine.generate(prompt(3), GREEDY, blend=False, cache_salt=fresh())
    assert (output.token_ids, output.stats.failure) == (plain.token_ids, "")


def test_chunks_are_shared_with_engines_without_adapters(
        lora_engine: BlendEngine, engine_pool: Any, folder: Path) -> None:
    def fingerprint(engine: BlendEngine) -> str:
        return engine.fingerprint

    assert fingerprint(lora_engine) == fingerprint(engine_pool.get(folder, **SETTINGS))
