"""Engines whose connector and workers do not go together are refused at their start, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from blendrag import BlendConfig, BlendEngine
from blendrag.errors import ConfigError, ModelError
from blendrag.runtime.engine.connectors import CONNECTOR, WORKER, check_connector
from blendrag.runtime.engine.start import _all_or_nothing, _in_process
from blendrag.runtime.serving import arguments as arguments_of_a_server
from tests.engine.families import build, named

OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
              "kv_connector_extra_config": {"cpu_bytes_to_use": 2**26}}
BOTH = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [CONNECTOR, OFFLOADING]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(named("Llama"), tmp_path_factory.mktemp("connectors") / "model")


def arguments(folder: Path, **more: Any) -> EngineArgs:
    return EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=512,
                      kv_cache_memory_bytes=2**24, **more)


@pytest.mark.parametrize(("connector", "said"), [
    (BOTH, "blending does not work beside another KV connector, which would store blended KV under the names of exact"),
    (OFFLOADING, f"{WORKER} does not work with the KV connector OffloadingConnector"),
    (None, f"{WORKER} runs without its KV connector: name BlendConnector alone"),
], ids=["beside another", "another", "none"])
def test_the_worker_takes_its_own_connector_alone(folder: Path, connector: Any, said: str) -> None:
    config = arguments(folder, worker_cls=WORKER, kv_transfer_config=connector).create_engine_config()
    with pytest.raises(ModelError, match=said):
        check_connector(config)


@pytest.mark.parametrize(("options", "said"), [
    ({"worker_cls": WORKER, "kv_transfer_config": BOTH}, "beside another KV connector"),
    ({"kv_transfer_config": CONNECTOR}, f"BlendConnector does not work with the worker .*: set --worker-cls {WORKER}"),
], ids=["another connector", "another worker"])
def test_vllm_does_not_start_with_what_does_not_go_together(engine_pool: Any, folder: Path, options: dict[str, Any],
                                                            said: str) -> None:
    """`vllm serve` with options of one's own: the engine says it, and not the first request."""
    engine_pool.close()
    with pytest.raises(ModelError, match=said), _all_or_nothing(), _in_process():
        LLMEngine.from_engine_args(arguments(folder, **options))


def test_vllms_offloading_is_refused_before_the_model_is_loaded(engine_pool: Any, folder: Path) -> None:
    engine_pool.close()
    with pytest.raises(ModelError, match=r"offloading does not work beside blending.*leave kv_offloading_size out"):
        BlendEngine(str(folder), kv_offloading_size=1.0, max_model_len=512).generate("x")
    with pytest.raises(ConfigError, match="leave --kv-offloading-size out"):
        arguments_of_a_server("model", BlendConfig(), ["--kv-offloading-size=4"])
