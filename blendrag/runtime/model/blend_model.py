"""What blending needs to know of the model vLLM loaded, and why some models are refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention

from blendrag.errors import ModelError
from blendrag.runtime.model.rotation import NoRotation, Rotation, TransformersRotation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SAMPLES = 64
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
        group: index of its KV cache group, whose block table its slots come from.
        window: sliding window in tokens, 0 for none.
        soft_cap: tanh cap on the logits, 0 for none.
    """

    name: str
    attention: Any
    impl: Any
    rotation: Rotation | NoRotation
    group: int
    block_size: int
    window: int
    soft_cap: float

    @property
    def scale(self) -> float:
        return float(self.impl.scale)


class BlendModel:
    """The loaded model as blending sees it: attention layers in the order they run.

    Raises:
        ModelError: the model, or how it is run, has a property that blending does not support.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self.module = model
        self.vllm_config = vllm_config
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        refuse_by_config(vllm_config)
        _refuse_by_cache(kv_cache_config)
        groups = {name: (number, group.kv_cache_spec.block_size)
                  for number, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
        rotations: dict[int, Rotation] = {}
        self.layers = [self._layer(name, module, groups, rotations)
                       for name, module in model.named_modules() if isinstance(module, Attention)]
        if not self.layers:
            raise ModelError(f"{type(model).__name__} has no attention layers that blending knows: use another model")
        self._refuse_mixed_shapes()

    def _layer(self, name: str, attention: Any, groups: dict[str, tuple[int, int]],
               rotations: dict[int, Rotation]) -> Layer:
        impl = attention.impl
        for feature, value in (("ALiBi", getattr(impl, "alibi_slopes", None)),
                               ("attention sinks", getattr(impl, "sinks", None)),
                               ("shared KV layers", attention.kv_sharing_target_layer_name)):
            if value is not None:
                raise ModelError(f"blending does not support {feature} (layer {name}): use another model")
        if not hasattr(impl, "do_kv_cache_update"):
            raise ModelError(f"blending does not support the attention backend {type(impl).__name__}: choose another "
                             "with the engine argument attention_backend, FLASH_ATTN for instance")
        if attention.layer_name not in groups:
            raise ModelError(f"layer {name} has no KV cache of its own, which blending does not support")
        group, block_size = groups[attention.layer_name]
        return Layer(name, attention, impl, self._rotation(name, rotations), group, block_size,
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

    def _rotation(self, name: str, rotations: dict[int, Rotation]) -> Rotation | NoRotation:
        """The rotary embedding beside an attention layer; modules shared by layers are wrapped once."""
        parent = self.module.get_submodule(name.rpartition(".")[0])
        found = [child for child in parent.children()
                 if hasattr(child, "cos_sin_cache") or "Rotary" in type(child).__name__]
        shared = [child for child in self.module.modules()
                  if hasattr(child, "inv_freq") and "Rotary" in type(child).__name__]
        if not found and len(shared) != 1:
            return NoRotation()  # a model that gives positions otherwise is found out by the probe
        module = (found or shared)[0]
        if id(module) not in rotations:
            rotations[id(module)] = Rotation(module, self.dtype) if found else TransformersRotation(
                module, self.vllm_config.model_config.max_model_len, self.dtype)
        return rotations[id(module)]

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what KV depends on: sampled weights, dtype, rope tables, head layout, rank."""
        digest = blake3()
        sharing = (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank())
        digest.update(repr((type(self.module).__name__, str(self.dtype), sharing)).encode())
        for layer in self.layers:
            digest.update(repr((layer.attention.num_kv_heads, layer.attention.head_size, layer.window, layer.soft_cap,
                                layer.scale, layer.rotation.name)).encode())
            if isinstance(layer.rotation, Rotation):
                table = layer.rotation.cos
                digest.update(table[:: max(1, len(table) // _SAMPLES)].cpu().contiguous().numpy().tobytes())
        samples = []
        for name, parameter in self.module.named_parameters():
            bare = name.replace(".base_layer", "")  # as it is called without enable_lora
            digest.update(repr((bare, tuple(parameter.shape), str(parameter.dtype))).encode())
            flat = parameter.detach().reshape(-1)
            samples.append(flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float())
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
        return digest.hexdigest()


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


def _refuse_by_cache(kv_cache_config: KVCacheConfig) -> None:
    for group in kv_cache_config.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in ("FullAttentionSpec", "SlidingWindowSpec", "UniformTypeKVCacheSpecs"):
            raise ModelError(f"blending does not support layers with {kind.removesuffix('Spec')} caches: "
                             "use a model whose layers are ordinary attention")
