"""Nothing is reused that other weights or another configuration computed, nor what was stored before a reset."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams
from blendrag.runtime.compat import scheduler_connector
from tests.engine.families import build, named
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LINEAR, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(named("Llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def start(engine_pool: Any, store: Path) -> Any:
    def start(folder: Path, **settings: Any) -> Any:
        """An engine of the tiny model; all of them share one store."""
        return engine_pool.get(folder, config=BlendConfig(store_path=store), dtype="float32", enforce_eager=True,
                               kv_cache_memory_bytes=2**26, **{"max_model_len": 512} | settings)
    return start


@pytest.fixture
def engine(start: Any, model: Path) -> BlendEngine:
    return start(model)  # type: ignore[no-any-return]


def prompt() -> BlendPrompt:
    return BlendPrompt(SYSTEM, *map(Chunk, PASSAGES[:3]), QUESTION)


def reuse(engine: BlendEngine) -> list[tuple[bool, str]]:
    """What a prompt reuses of the store: nothing of it is in vLLM's prefix cache."""
    engine.reset_prefix_cache()
    [output] = engine.generate(prompt(), GREEDY, policy="none")
    assert output.stats.failure == ""
    return [(chunk.reused, chunk.reason) for chunk in output.stats.chunks]


ALL, NONE = [(True, "")] * 3, [(False, "not stored")] * 3


def altered(model: Path, folder: Path, parameter: str) -> Path:
    """A copy of the model with another value in one place."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights[parameter].view(-1)[-1] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_is_the_same_one_elsewhere_and_with_another_length(
        start: Any, model: Path, tmp_path: Path) -> None:
    engine = start(model)
    engine.encode(PASSAGES[:3])
    assert reuse(engine) == ALL
    first = engine.fingerprint
    (tmp_path / "link").symlink_to(shutil.copytree(model, tmp_path / "copy"))
    other = start(tmp_path / "link", max_model_len=1024)
    assert other.fingerprint == first
    assert reuse(other) == ALL


@pytest.mark.parametrize("parameter", [LINEAR, NORM])
def test_one_element_makes_another_model(start: Any, model: Path, tmp_path: Path, parameter: str) -> None:
    assert reuse(start(altered(model, tmp_path / "model", parameter))) == NONE


def test_one_value_of_the_configuration_makes_another_model(start: Any, model: Path) -> None:
    assert json.loads((model / "config.json").read_text())["rms_norm_eps"] != 1e-3
    assert reuse(start(model, hf_overrides={"rms_norm_eps": 1e-3})) == NONE


# While it runs.


def scheduler(engine: BlendEngine) -> Any:
    return engine._start().call(lambda vllm: vllm.engine_core.engine_core.scheduler)


def worker_call(engine: BlendEngine, method: str, *args: Any) -> None:
    engine._start().call(lambda vllm: vllm.collective_rpc(method, args=args))


def reset(engine: BlendEngine) -> None:
    assert engine._start().call(lambda vllm: vllm.reset_prefix_cache(reset_connector=True))


def test_a_reset_leaves_all_behind_at_once_and_touches_no_file_of_others(engine: BlendEngine) -> None:
    engine.encode(PASSAGES[:3])
    files, before = engine.store.keys(), engine.fingerprint
    assert reuse(engine) == ALL
    reset(engine)
    assert engine.fingerprint != before
    assert engine.stored(PASSAGES[:3]) == [False] * 3
    assert engine.store.stats.ram_entries == 0
    assert reuse(engine) == NONE
    assert [chunk.new for chunk in engine.encode(PASSAGES[:3])] == [True] * 3
    assert reuse(engine) == ALL
    again = set(engine.store.keys()) - set(files)
    reset(engine)
    assert engine.store.keys() == files, f"{again} are of no use to any engine any more"


def test_other_weights_use_nothing_that_earlier_ones_stored(engine: BlendEngine) -> None:
    engine.encode(PASSAGES[:3])
    before = reuse(engine), engine.fingerprint
    worker_call(engine, "reload_weights")
    assert before[0] == ALL
    assert engine.fingerprint != before[1]
    engine._start().call(lambda vllm: vllm.reset_prefix_cache())
    assert reuse(engine) == NONE
    engine.encode(PASSAGES[:3])
    assert reuse(engine) == ALL
    engine._start().call(lambda vllm: vllm.reset_prefix_cache())
    [full] = engine.generate(prompt(), GREEDY, policy="full")
    [plain] = engine.generate(prompt(), GREEDY, blend=False, cache_salt="plain")
    assert full.token_ids == plain.token_ids


def test_what_an_operators_function_did_to_the_weights_is_seen(engine: BlendEngine) -> None:
    """As the CPU's linear weights cannot be read, any function counts as one that changed them there."""
    before = engine.fingerprint
    worker_call(engine, "apply_model", lambda model: next(model.parameters()).data.mul_(1))
    assert engine.fingerprint != before


@pytest.mark.parametrize("moment", ["get_num_new_matched_tokens", "build_connector_meta"])
def test_a_request_that_came_before_a_reset_is_computed_after_it(
        engine: BlendEngine, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits, and when its step is already planned."""
    engine.encode(PASSAGES[:3])
    [plain] = engine.generate(prompt(), GREEDY, blend=False, cache_salt=f"plain {moment}")
    connector = engine._start().call(scheduler_connector)
    method, resets = getattr(connector, moment), []

    def during(*args: Any) -> Any:
        late = moment == "build_connector_meta"
        found = method(*args) if late else None
        if not resets and (not late or found.jobs):
            resets.append(connector.reset_cache())
        return found if late else method(*args)

    engine._start().call(lambda vllm: vllm.reset_prefix_cache())
    monkeypatch.setattr(connector, moment, during)
    [output] = engine.generate(prompt(), GREEDY, policy="none")
    assert resets == [True]
    assert [chunk.reason for chunk in output.stats.chunks] == ["outdated"] * 3
    assert (output.token_ids, output.stats.failure) == (plain.token_ids, "")
    assert output.stats.reused_tokens == 0
    assert reuse(engine) == NONE


def test_blended_blocks_from_before_are_not_found_in_the_prefix_cache(engine: BlendEngine) -> None:
    """Even where vLLM keeps them."""
    engine.encode(PASSAGES[:3])
    assert reuse(engine) == ALL
    scheduler(engine).connector.reset_cache()
    engine.encode(PASSAGES[:3])
    [output] = engine.generate(prompt(), GREEDY, policy="none")
    assert [chunk.reused for chunk in output.stats.chunks] == [True] * 3
    assert output.stats.prefix_cached_tokens < output.stats.chunks[0].start + 16


def test_what_only_this_engine_could_find_goes_with_it(engine: BlendEngine, engine_pool: Any, model: Path,
                                                       start: Any) -> None:
    reset(engine)
    before = len(engine.store.keys())
    engine.encode(["A passage that is stored after a reset of the caches, of twenty tokens or a few more than that."])
    assert len(engine.store.keys()) > before
    engine_pool.close()
    assert len(start(model).store.keys()) == before
