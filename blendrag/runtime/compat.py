"""Every difference between supported vLLM versions (0.26 and newer) that blendrag has to know about."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import vllm.logger
import vllm.model_executor.model_loader.utils as loading
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample.logits_processor import LogitsProcessor

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # 0.26
    KVConnectorTransferResults = None

try:
    from vllm.utils.import_utils import resolve_obj_by_qualname
except ImportError:  # where it once was
    from vllm.utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


FAILURES_NAME_REQUESTS = KVConnectorTransferResults is not None
"""Whether a worker's connector says which requests could not be loaded; in 0.26 it names their blocks, which vLLM
cannot understand of models with several KV cache groups."""


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """What vLLM asks a worker's connector for after each step, where `FAILURES_NAME_REQUESTS`.

    Args:
        finished: requests whose loading has ended, `failed` ones among them.
    """
    assert KVConnectorTransferResults is not None
    return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)


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


def keep_text_only(vllm_config: VllmConfig, args: Any) -> None:
    """Takes back that vLLM accepts embedded images wherever a KV connector may load KV (0.32 does).

    It would run the image processor of a model of which only text is wanted (`limit_mm_per_prompt={"image": 0}`).
    Chunks never bring the KV of an image.

    Args:
        args: the engine arguments that `vllm_config` was made of.
    """
    multimodal: Any = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(multimodal, "allow_missing_mm_embeddings", False):
        multimodal.allow_missing_mm_embeddings = False
        multimodal.enable_mm_embeds = bool(getattr(args, "enable_mm_embeds", False))


def attention_layers(model_config: Any) -> int:
    """How many layers a model has, every one with attention: others are refused."""
    return int(model_config.hf_text_config.num_hidden_layers)


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


def prefix_cached(hashes: Sequence[Any], tokens: int, cache_manager: Any, block_pool: BlockPool | None,
                  kv_cache_config: KVCacheConfig, block_size: int) -> int:
    """Leading tokens of a prompt that the prefix cache holds under some hashes of its blocks.

    Args:
        tokens: of the prompt, of which the last is always computed.
        cache_manager: vLLM's `KVCacheManager`, which knows what sliding windows need; None in versions that do not
            hand it to connectors.
        block_pool: asked then; with several KV cache groups the answer is 0.
        block_size: tokens that one hash stands for.
    """
    if cache_manager is not None:
        return int(cache_manager.coordinator.find_longest_cache_hit(hashes, tokens - 1)[1])
    if block_pool is None or len(kv_cache_config.kv_cache_groups) != 1:
        return 0
    full_blocks = min((tokens - 1) // block_size, len(hashes))
    hits = (block_pool.get_cached_block(name, [0]) is not None for name in hashes[:full_blocks])
    return block_size * next((number for number, hit in enumerate(hits) if not hit), full_blocks)


def is_beam_step(request: Request) -> bool:
    """Whether a request is one step of vLLM's beam search: the prompt and the beam so far, for one more token.

    Its parameters are vLLM's own, not the client's: nothing that the client says of blending reaches the engine.
    """
    params = request.sampling_params
    return (params is not None and request.kv_transfer_params is None and params.max_tokens == 1
            and not params.detokenize and (params.logprobs or 0) >= 2)


def sampled_from(request_id: str) -> str | None:
    """What the requests of several samples of one prompt (n > 1) have in common; None for other requests."""
    sample = re.match(r"\d+_(.+)", request_id)
    return sample[1] if sample else None


def busy(engine: Any) -> bool:
    """Whether an `LLMEngine` in this process has anything to do: requests, or work of its connector."""
    return bool(engine.has_unfinished_requests() or engine.engine_core.engine_core.scheduler.has_requests())


def scheduler_connector(engine: Any) -> Any:
    """The scheduler side of the connector of an `LLMEngine` in this process."""
    return engine.engine_core.engine_core.scheduler.connector


def output_handler(llm: Any) -> Any:
    """The task in which an `AsyncLLM` receives its engine's outputs, started; it ends when the engine dies."""
    llm._run_output_handler()
    return llm.output_handler


def leave_to_parent(llm: Any) -> None:
    """Called in a fork of the process that made an `AsyncLLM`: its end must not end the engine of the parent.

    vLLM's finalizers, which run in a fork as well, send signals to the engine's process.
    """
    client = getattr(llm, "engine_core", None)
    manager = getattr(getattr(client, "resources", None), "engine_manager", None)
    for owner in (client, manager):
        finalizer = getattr(owner, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()


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


WEIGHT_CHANGES = ("reload_weights", "start_weight_update", "update_weights", "finish_weight_update",
                  "elastic_ep_execute")
"""Methods of vLLM's workers after which a loaded model may have other weights; a version may lack some."""


def extension_methods(vllm_config: VllmConfig) -> list[str]:
    """Names of what an operator's own class (`worker_extension_cls`) adds to the worker."""
    path = getattr(vllm_config.parallel_config, "worker_extension_cls", "")
    if not path:
        return []
    extension = resolve_obj_by_qualname(path)
    return [name for name in dir(extension) if not name.startswith("__") and callable(getattr(extension, name))]


@contextmanager
def before_weight_processing(take: Callable[[Any], None]) -> Iterator[None]:
    """Within it `take` is called with each model whose weights vLLM has loaded, before it post-processes them.

    All loaders call one function for that, which each of their modules imports by name.
    """
    process = loading.process_weights_after_loading

    def take_and_process(model: Any, *args: Any, **kwargs: Any) -> None:
        take(model)
        process(model, *args, **kwargs)

    _replace_in_loaders(process, take_and_process)
    try:
        yield
    finally:
        _replace_in_loaders(take_and_process, process)  # also in modules that were imported meanwhile


def _replace_in_loaders(before: Any, after: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.model_executor.model_loader"):
            for attribute, value in list(vars(module).items()):
                if value is before:
                    setattr(module, attribute, after)
