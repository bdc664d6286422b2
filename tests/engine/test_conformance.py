"""With all rows recomputed, a blend pass is a full prefill: it must equal plain vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendEngine
from blendrag.errors import ModelError
from tests.engine.conformance import check, check_family, check_some_rows, family_engine
from tests.engine.families import REFUSED, WORKING, Family, build, named
from tests.engine.placement import placement_errors
from tests.engine.texts import PASSAGES, layouts, short_layouts


def by_name(families: Sequence[Family]) -> Any:
    return pytest.mark.parametrize("family", [pytest.param(family, id=family.slug) for family in families])


def test_full_equals_plain_vllm_on_smollm2(smollm2_engine: BlendEngine) -> None:
    check(smollm2_engine, short_layouts(), 24)


@by_name(WORKING)
def test_full_equals_plain_vllm_on_random_weights(family: Family, engine_pool: Any, tmp_path: Path) -> None:
    engine = family_engine(engine_pool.get, family, build(family, tmp_path / family.slug))
    check_family(engine, family)


def test_a_compiled_model_equals_plain_vllm_too(engine_pool: Any, tmp_path: Path) -> None:
    """As vLLM runs a model unless told otherwise, but for the code that would be generated from the traced graph."""
    traced = {"enforce_eager": False, "compilation_config": {"mode": CompilationMode.DYNAMO_TRACE_ONCE,
                                                             "backend": "eager"}}
    family = replace(named("Llama"), engine=traced)
    engine = family_engine(engine_pool.get, family, build(family, tmp_path / "compiled"))
    check(engine, short_layouts(), 8)
    check_some_rows(engine, family.noise)
    assert engine._start().call(lambda _: get_kv_transfer_group().worker.blender.forward._compiled)


def test_the_check_of_placed_keys_notices_a_wrong_rotation(engine_pool: Any, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    family = named("Command R7B")  # owns a rotary embedding in layers that do not rotate; the probe is to find out
    folder = build(family, tmp_path / "model")
    engine_pool.close()
    monkeypatch.setattr("blendrag.runtime.worker.settle_rotations", lambda model: None)
    with family_engine(BlendEngine, family, folder) as engine:
        assert max(max(layers) for layers in placement_errors(engine, PASSAGES[0])) > 100 * family.noise


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
