"""Starts vLLM with blending in it, in this process or in one of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from blendrag.config import BlendConfig
from blendrag.errors import BlendError, ModelError
from blendrag.forks import Owner
from blendrag.runtime.engine.connectors import CONNECTOR, NO_OFFLOADING, WORKER, check_connector
from blendrag.runtime.engine.failure import FailureNote, as_error, own_fault
from blendrag.runtime.engine.memory import free_memory
from blendrag.store import open_store

_starting = threading.Lock()
_owner: Owner | None = None
"""Of the engine that started last in this process, or in the one that it was forked from."""

_GUARD = 'put what the file does under `if __name__ == "__main__":`'


def start_engine(model: str, config: BlendConfig, engine_args: dict[str, Any]) -> Any:
    """vLLM's `LLMEngine`, running in this thread and process.

    Args:
        engine_args: any of vLLM's engine arguments.

    Raises:
        ModelError: vLLM cannot run the model, or blending does not support it.
        EngineClosedError: this process was forked from one in which an engine runs.
        StoreError: the store's folder cannot be opened.
        InternalError: blendrag itself failed.
    """
    from vllm import EngineArgs
    from vllm.distributed.kv_transfer import has_kv_transfer_group
    from vllm.v1.engine.llm_engine import LLMEngine

    from blendrag.runtime.compat import spare_llvmlite

    global _owner
    _check(config, engine_args)
    if _owner is not None and _owner.forked and has_kv_transfer_group():
        _owner.require()  # vLLM's globals are those of an engine that stayed behind
    with _starting:
        if has_kv_transfer_group():
            gc.unfreeze()  # as vLLM hides what was there when it started
            gc.collect()  # closes an engine that nothing refers to any more
        if has_kv_transfer_group():
            raise ModelError("another engine runs in this process: close it first, or share it")
        _owner = Owner()
        spare_llvmlite()
        with _errors_of(model), _all_or_nothing(), _in_process():
            vllm_config, args = _configure(EngineArgs, model, config, engine_args)
            return LLMEngine.from_vllm_config(vllm_config, disable_log_stats=args.disable_log_stats)


def start_async_engine(model: str, config: BlendConfig, engine_args: dict[str, Any]) -> tuple[Any, FailureNote]:
    """vLLM's `AsyncLLM`, its engine running in a process of its own, and where that process notes why it died.

    Blocks until the model is loaded.  Raises as `start_engine`.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    _check(config, engine_args)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork inherits locks that threads hold
    with _errors_of(model):
        vllm_config, args = _configure(AsyncEngineArgs, model, config, engine_args)
        note = FailureNote(vllm_config.kv_transfer_config.engine_id)
        try:
            return AsyncLLM.from_vllm_config(vllm_config, enable_log_requests=args.enable_log_requests,
                                             disable_log_stats=args.disable_log_stats), note
        except Exception as error:
            told = note.read()
            note.remove()
            if told is None:
                raise ModelError(_unexplained(model)) from error
            raise as_error(*told) or _cannot_start(model, told[1]) from error


def _check(config: BlendConfig, engine_args: dict[str, Any]) -> None:
    """Complains before a model is loaded."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ModelError(f"an engine's process imports the program's main file, which starts an engine: {_GUARD}")
    reserved = {"kv_transfer_config", "worker_cls"} & set(engine_args)
    if reserved:
        raise ModelError(f"{', '.join(sorted(reserved))} is set by blendrag: leave it out")
    if engine_args.get("kv_offloading_size") is not None:
        raise ModelError(NO_OFFLOADING.format(option="kv_offloading_size"))
    check_store(config)


def check_store(config: BlendConfig) -> None:
    """Opens the store's folder once; StoreError where that fails."""
    if config.store_path is not None:
        open_store(config.store_path, disk_bytes=config.disk_bytes).close()


def _configure(kind: Any, model: str, config: BlendConfig, engine_args: dict[str, Any]) -> tuple[Any, Any]:
    """`VllmConfig`, and the engine arguments of this kind that it was made of."""
    from blendrag.runtime.compat import keep_text_only
    from blendrag.runtime.model.blend_model import refuse_by_config

    connector = CONNECTOR | {"kv_connector_extra_config": config.embedded().model_dump(mode="json")}
    args = kind(model=model, worker_cls=WORKER, kv_transfer_config=connector, **moderate_memory(engine_args),
                **engine_args)
    vllm_config = args.create_engine_config()
    check_connector(vllm_config)
    keep_text_only(vllm_config, args)
    refuse_by_config(vllm_config)
    return vllm_config, args


@contextmanager
def _errors_of(model: str) -> Iterator[None]:
    try:
        yield
    except BlendError:
        raise
    except Exception as error:
        if (fault := own_fault(error)) is not None:
            raise fault from error
        raise _cannot_start(model, _first_line(error)) from error


def _cannot_start(model: str, why: str) -> ModelError:
    return ModelError(f"vLLM cannot start {model!r} ({why.rstrip('.')}): check the model's path or name and the engine "
                      "arguments")


@contextmanager
def _all_or_nothing() -> Iterator[None]:
    """Undoes half a start, so that another engine can start in this process while somebody holds the error."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    try:
        yield
    except Exception as error:
        ensure_kv_transfer_shutdown()
        traceback.clear_frames(error.__traceback__)  # they hold the model
        free_memory()
        raise


def _unexplained(model: str) -> str:
    """Of a process that ended before it could note why."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    with suppress(OSError, UnicodeDecodeError):
        if file and "__main__" not in Path(file).read_text("utf-8"):
            return f"the engine's process imports {file}, which does its work without a guard: {_GUARD}"
    return f"vLLM cannot start {model!r} (its process ended before it said why): look at its log, on standard error"


def moderate_memory(engine_args: Collection[str]) -> dict[str, int]:
    """A moderate paged cache on the CPU, where vLLM would take nearly all of the machine's memory, used or not.

    Args:
        engine_args: names of those that a user has set; one that sizes the cache stands.
    """
    from vllm.platforms import current_platform

    chosen = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}.intersection(engine_args)
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


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "validation error" not in line]
    message = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
    return message.rstrip(".")
