"""What blending needs to know of the model vLLM loaded, and why some models are refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import Attention

from blendrag.errors import ModelError
from blendrag.runtime.model.identity import fingerprint
from blendrag.runtime.model.layer_rotations import LayerRotations
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.model.weights import LoadedWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_QUANTISED = ("fp8", "nvfp4", "int8", "int4")
_DRAFTS = (None, "ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculative methods that look at nothing but tokens and the last hidden state.  A draft model would attend to KV of
its own, which nobody computes for reused chunks: right answers, but next to no draft accepted."""


@dataclass
class Layer:
    """One attention layer.

    Attributes:
        attention: vLLM's `Attention` module.
        impl: its backend; also what writes the paged cache.
        rotations: ways in which its keys may depend on their position, the most likely one first; the start-up probe
            leaves the one that fits.
        group: index of its KV cache group, whose block table its slots come from.
        window: sliding window in tokens, 0 for none.
        soft_cap: tanh cap on the logits, 0 for none.
    """

    name: str
    attention: Any
    impl: Any
    rotations: list[Rotation | NoRotation]
    group: int
    block_size: int
    window: int
    soft_cap: float

    @property
    def scale(self) -> float:
        return float(self.impl.scale)

    @property
    def rotation(self) -> Rotation | NoRotation:
        """How its keys depend on their position."""
        return self.rotations[0]

    def choose(self, rotation: Rotation | NoRotation) -> None:
        """Leaves one of `rotations`, and the others' tables to whichever layer needs them."""
        self.rotations = [rotation]


class BlendModel:
    """The loaded model as blending sees it: attention layers in the order they run.

    Args:
        weights: digests taken while vLLM loaded it.

    Raises:
        ModelError: the model, or how it is run, has a property that blending does not support.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig,
                 weights: LoadedWeights | None = None) -> None:
        self.module = model
        self._weights = weights or LoadedWeights()
        self.vllm_config = vllm_config
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        refuse_by_config(vllm_config)
        refuse_by_cache(kv_cache_config)
        groups = {name: (number, group.kv_cache_spec.block_size)
                  for number, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        rotations = LayerRotations(model, vllm_config)
        self.layers = [self._layer(name, module, groups, rotations.of(name, module.head_size))
                       for name, module in model.named_modules() if isinstance(module, Attention)]
        if not self.layers:
            raise ModelError(f"{type(model).__name__} has no attention layers that blending knows: use another model")
        self._refuse_mixed_shapes()

    def _layer(self, name: str, attention: Any, groups: dict[str, tuple[int, int]],
               rotations: list[Rotation | NoRotation]) -> Layer:
        impl = attention.impl
        for feature, value in (("ALiBi", getattr(impl, "alibi_slopes", None)),
                               ("attention sinks", getattr(impl, "sinks", None)),
                               ("shared KV layers", attention.kv_sharing_target_layer_name),
                               ("attention within chunks of a prompt",
                                getattr(attention, "attention_chunk_size", None)),
                               ("windows that begin at chunks of a prompt",
                                None if getattr(impl, "chunk_lookback", -1) < 0 else impl.chunk_lookback)):
            if value is not None:
                raise ModelError(f"blending does not support {feature} (layer {name}): use another model")
        if not hasattr(impl, "do_kv_cache_update"):
            raise ModelError(f"blending does not support the attention backend {type(impl).__name__}: choose another "
                             "with the engine argument attention_backend, FLASH_ATTN for instance")
        if attention.layer_name not in groups:
            raise ModelError(f"layer {name} has no KV cache of its own, which blending does not support")
        group, block_size = groups[attention.layer_name]
        return Layer(name, attention, impl, rotations, group, block_size,
                     _window(attention), float(getattr(impl, "logits_soft_cap", None) or 0))

    def _refuse_mixed_shapes(self) -> None:
        """An entry is one tensor over all layers, so all layers' keys and values must have one shape."""
        shapes = {(layer.attention.num_kv_heads, layer.attention.head_size,
                   getattr(layer.attention, "head_size_v", layer.attention.head_size)) for layer in self.layers}
        if len({(heads, size) for heads, size, _ in shapes}) > 1:
            raise ModelError("blending does not support layers with different numbers or sizes of KV heads: "
                             "use a model whose layers are all alike")
        if any(size != size_v for _, size, size_v in shapes):
            raise ModelError("blending does not support values of another size than keys: use another model")

    @property
    def form(self) -> tuple[torch.dtype, int, int, int]:
        """Dtype, layers, KV heads and head size of this rank's entries."""
        attention = self.layers[0].attention
        return self.dtype, len(self.layers), attention.num_kv_heads, attention.head_size

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what KV depends on, for this rank."""
        return fingerprint(self, self._weights.of(self.module))


def _window(attention: Any) -> int:
    """`Attention.sliding_window` is the number of tokens a token sees, itself included; None for all."""
    return int(attention.sliding_window or 0)


def refuse_by_config(vllm_config: VllmConfig) -> None:
    """Refuses what the configuration tells, before weights are loaded.

    Raises:
        ModelError: the model, or how it is run, has a property that blending does not support.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    drafts = vllm_config.speculative_config and vllm_config.speculative_config.method
    for refused, what, remedy in (
            (parallel.pipeline_parallel_size > 1, "pipeline parallel",
             "set pipeline_parallel_size=1 and use tensor_parallel_size instead"),
            (any(getattr(parallel, f"{phase}_context_parallel_size", 1) > 1 for phase in ("prefill", "decode")),
             "context parallel", "use tensor_parallel_size alone"),
            # Their replicas compute in step, and would wait for each other in a pass that only one of them runs.
            (parallel.data_parallel_size > 1 and model.is_moe, "data parallel with a mixture of experts",
             "set data_parallel_size=1 and start several engines instead"),
            (model.runner_type != "generate", "pooling models", "use a model that generates text"),
            (model.is_encoder_decoder, "encoder-decoder models", "use a decoder-only model"),
            (model.is_attention_free or model.is_hybrid or model.has_inner_state, "state space layers",
             "use a model whose layers are all ordinary attention"),
            (model.use_mla, "latent attention (MLA)", "use a model with ordinary attention"),
            (cache_dtype.startswith(_QUANTISED), f"a quantised KV cache ({cache_dtype})",
             "set kv_cache_dtype='auto'"),
            (drafts not in _DRAFTS, f"drafts of a model with KV of its own (speculative method {drafts})",
             "use the method ngram or suffix")):
        if refused:
            raise ModelError(f"blending does not support {what}: {remedy}")


def refuse_by_cache(kv_cache_config: KVCacheConfig) -> None:
    """Refuses layers that keep something else than the KV of each token they may look back to."""
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs
        for spec in inner.values() if inner is not None else (group.kv_cache_spec,):
            kind = type(spec).__name__
            if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
                raise ModelError(f"blending does not support layers with {kind.removesuffix('Spec')} caches: "
                                 "use a model whose layers are ordinary attention")
            # Without vLLM's hybrid KV cache manager (as with some connectors) full attention has these, too.
            for feature, present in (
                    ("attention within chunks of a prompt", getattr(spec, "attention_chunk_size", None) is not None),
                    ("attention to later tokens", getattr(spec, "non_causal", False)),
                    ("caches of other than one state for each token", getattr(spec, "tokens_per_state", 1) != 1)):
                if present:
                    raise ModelError(f"blending does not support {feature} (layer {group.layer_names[0]}): "
                                     "use another model")
