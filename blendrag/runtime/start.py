"""Starts an embedded vLLM engine with blending in it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from blendrag.config import BlendConfig
from blendrag.errors import BlendError, ModelError
from blendrag.store import open_store

CONNECTOR = {"kv_connector": "BlendConnector", "kv_connector_module_path": "blendrag.runtime.connector",
             "kv_role": "kv_both"}
WORKER = "blendrag.runtime.worker.BlendWorker"


def start_engine(model: str, config: BlendConfig, engine_args: dict[str, Any]) -> Any:
    """vLLM's `LLMEngine`, running in this thread and process.

    Args:
        engine_args: any of vLLM's engine arguments.

    Raises:
        ModelError: vLLM cannot run the model, or blending does not support it.
    """
    from vllm import EngineArgs
    from vllm.distributed.kv_transfer import has_kv_transfer_group
    from vllm.v1.engine.llm_engine import LLMEngine

    from blendrag.runtime.model import refuse_by_config

    reserved = {"kv_transfer_config", "worker_cls"} & set(engine_args)
    if reserved:
        raise ModelError(f"{', '.join(sorted(reserved))} is set by blendrag: leave it out")
    if config.store_path is not None:
        open_store(config.store_path).close()  # complains before a model is loaded
    if has_kv_transfer_group():
        raise ModelError("another engine runs in this process: close it first, or share it")
    try:
        with _in_process():
            connector = CONNECTOR | {"kv_connector_extra_config": config.model_dump(mode="json")}
            args = EngineArgs(model=model, worker_cls=WORKER, kv_transfer_config=connector, **_memory(engine_args),
                              **engine_args)
            vllm_config = args.create_engine_config()
            refuse_by_config(vllm_config)
            return LLMEngine.from_vllm_config(vllm_config, disable_log_stats=args.disable_log_stats)
    except BlendError as error:
        _let_go(error)
        raise
    except Exception as error:
        _let_go(error)
        raise ModelError(f"vLLM cannot start {model!r} ({_first_line(error)}): check the model's path or name and the "
                         "engine arguments") from error


def _let_go(error: Exception) -> None:
    """Undoes half a start, so that another engine can start in this process while somebody holds the error."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    traceback.clear_frames(error.__traceback__)  # they hold the model


def _memory(engine_args: dict[str, Any]) -> dict[str, int]:
    """A moderate paged cache on the CPU, where vLLM would take nearly all of the machine's memory, used or not.

    A user's own setting, of any of the names that vLLM knows, stands.
    """
    from vllm.platforms import current_platform

    chosen = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"} & set(engine_args)
    if chosen or not current_platform.is_cpu() or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return {}
    return {"kv_cache_memory_bytes": min(4 * 2**30, psutil.virtual_memory().available // 4)}


@contextmanager
def _in_process() -> Iterator[None]:
    """Keeps the engine in this process, where no `__main__` guard is needed; the user's setting is put back."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "validation error" not in line]
    message = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
    return message.rstrip(".")
