"""Steps of vLLM's own over a made-up prompt, run by the worker before there are requests."""

from __future__ import annotations

import time
from dataclasses import fields
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

_NUMBERS = count()


class TrialSteps:
    """Prefills with the worker's own model runner, as its scheduler would ask for it.

    What they leave in the paged cache is of no meaning: no request may have blocks there yet.

    Args:
        worker: vLLM's, with its model loaded and its paged cache allocated.
        metadata: what the connector's worker side takes for a step in which it has nothing to do.

    Attributes:
        max_tokens: longest prompt that model and paged cache take.
    """

    def __init__(self, worker: Any, metadata: KVConnectorMetadata) -> None:
        self._worker = worker
        self._metadata = metadata
        cache = worker.model_runner.kv_cache_config
        self._block_sizes = [int(group.kv_cache_spec.block_size) for group in cache.kv_cache_groups]
        in_cache = (cache.num_blocks - 2) * min(self._block_sizes)
        self.max_tokens: int = min(worker.model_config.max_model_len - 1, in_cache)

    def run(self, tokens: int, cached: int = 0) -> float:
        """One step over `tokens` tokens behind `cached` ones, the first token sampled; returns its seconds."""
        name = f"blendrag-trial-{next(_NUMBERS)}"
        ids = [number * 101 % self._vocabulary for number in range(cached + tokens)]
        values = {"req_id": name, "prompt_token_ids": ids, "prefill_token_ids": ids, "mm_features": [],
                  "sampling_params": SamplingParams(max_tokens=2, temperature=0.0), "pooling_params": None,
                  "block_ids": self.block_ids(len(ids)), "num_computed_tokens": cached, "lora_request": None}
        known = {field.name for field in fields(NewRequestData)}
        step = self._empty()
        step.scheduled_new_reqs = [NewRequestData(**{key: value for key, value in values.items() if key in known})]
        step.num_scheduled_tokens = {name: tokens}
        step.total_num_scheduled_tokens = tokens
        end = self._empty()
        end.finished_req_ids = {name}
        started = time.perf_counter()
        output = self._worker.execute_model(step)
        if output is None:
            output = self._worker.sample_tokens(None)
        if hasattr(output, "get_output"):  # still on its way from the device
            output.get_output()
        seconds = time.perf_counter() - started
        self._worker.execute_model(end)
        return seconds

    def block_ids(self, tokens: int) -> tuple[list[int], ...]:
        """Blocks of the paged cache for so many tokens, per KV cache group."""
        return tuple(list(range(1, 2 + tokens // size)) for size in self._block_sizes)

    @property
    def _vocabulary(self) -> int:
        return int(self._worker.model_config.get_vocab_size()) // 2

    def _empty(self) -> SchedulerOutput:
        step = SchedulerOutput.make_empty()
        step.num_common_prefix_blocks = [0] * len(self._block_sizes)
        step.kv_connector_metadata = self._metadata
        return step
