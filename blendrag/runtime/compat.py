"""Every difference between supported vLLM versions (0.26 and newer) that blendrag has to know about."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import vllm.logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one prefix-cache hash stands for."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def token_prompt(ids: list[int], cache_salt: str | None) -> dict[str, Any]:
    """A prompt of token ids as vLLM's engine takes it."""
    prompt: dict[str, Any] = {"prompt_token_ids": ids}
    return prompt | ({"cache_salt": cache_salt} if cache_salt else {})


def load_tokenizer(model_config: Any) -> Any:
    """The model's Hugging Face tokenizer; None where the engine runs without one."""
    if model_config.skip_tokenizer_init:
        return None
    return cached_tokenizer_from_config(model_config)


def in_one_process(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler and the only worker share a process."""
    return bool(vllm_config.parallel_config.distributed_executor_backend == "uni")


def count_cached(prefill_stats: Any, tokens: int) -> None:
    """Corrects a request's count of prompt tokens that were not computed, before vLLM sends it on.

    vLLM takes all that a connector claims for cached, the rows that a blend pass computed included.  Its own cache's
    share of a prompt counts as far as the pass had that stored too: what it had not, it computed once more.

    Args:
        prefill_stats: a request's `PrefillStats`; None where vLLM does not count.
        tokens: prompt tokens whose stored KV was used as it is.
    """
    if prefill_stats is not None:
        local = min(prefill_stats.num_local_cached_tokens, tokens)
        prefill_stats.set(prefill_stats.num_prompt_tokens, local, tokens - local)


def busy(engine: Any) -> bool:
    """Whether an `LLMEngine` in this process has anything to do: requests, or work of its connector."""
    return bool(engine.has_unfinished_requests() or engine.engine_core.engine_core.scheduler.has_requests())


def scheduler_connector(engine: Any) -> Any:
    """The scheduler half of the connector of an `LLMEngine` in this process."""
    return engine.engine_core.engine_core.scheduler.connector


def output_handler(llm: Any) -> Any:
    """The task in which an `AsyncLLM` receives its engine's outputs, started; it ends when the engine dies."""
    llm._run_output_handler()
    return llm.output_handler


def end_requests(llm: Any) -> None:
    """Makes every request of an `AsyncLLM` raise `EngineDeadError` where it is waited for."""
    llm.output_processor.propagate_error(EngineDeadError())


def set_up_logging(args: Any) -> None:
    """Logs as the options of a `vllm serve` say, where it has such options (not in 0.26)."""
    set_up = getattr(vllm.logger, "configure_logging_from_args", None)
    if set_up is not None:
        set_up(args)


def logits_processor_interfaces() -> tuple[type, ...]:
    """What a custom logits processor has to be: vLLM has had two model runners, each with an interface of its own.

    0.26 runs any engine that has such processors with its older runner.
    """
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as NewerInterface
    except ImportError:
        return (LogitsProcessor,)
    return LogitsProcessor, NewerInterface


def spare_llvmlite() -> None:
    """Lets an engine start on the CPU where llvmlite is loaded, by a program's numba or an earlier engine's n-grams.

    There vLLM 0.32 reads the `__dict__` of whatever it finds in any module, and llvmlite's library makes a function
    of every name that it is asked for.
    """
    if "llvmlite.binding.ffi" in sys.modules:
        sys.modules["llvmlite.binding.ffi"].lib._fntab.setdefault("__dict__", {})
