"""The fingerprint of a model: a digest of everything that the KV of given tokens depends on.

Token ids are part of an entry's key, so the tokenizer's vocabulary is not part of the fingerprint: the same ids have
the same KV whatever their text.  What chunks without a prefix are encoded behind does depend on the tokenizer.
`max_model_len` counts only as far as it decides on the rotary tables (long rope).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm
from blake3 import blake3
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from blendrag.runtime.compat import load_tokenizer
from blendrag.runtime.model.rotation import Rotation
from blendrag.tokens import SegmentTokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from blendrag.runtime.model.blend_model import BlendModel, Layer

NUMERICS = 1
"""Raise it with each change to what passes compute for an entry, or to what an entry holds."""

_TABLE_ROWS = 64
"""A rotary table is fixed by its frequencies: the rows of the first positions tell two tables apart."""

_NO_EFFECT = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_name_or_path", "architectures", "auto_map", "dtype", "finetuning_task", "id2label",
    "label2id", "name_or_path", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache"})
"""Names in a Hugging Face configuration that say where a model lies, who wrote it, or what callers get back.  The
architecture and the dtype that vLLM resolved count by themselves."""
_QUANTISATION = ("quantization_config", "compression_config")
"""Here all names count: a `dtype` is that of stored weights."""


def fingerprint(model: BlendModel, weights: bytes) -> str:
    """Identifies what KV depends on, for one tensor-parallel rank; 64 hex digits.

    Args:
        weights: digest of the rank's weights as they were loaded.
    """
    about = [NUMERICS, vllm.__version__, type(model.module).__name__, str(model.dtype),
             get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank(),
             configuration(model.vllm_config), sink_ids(model.vllm_config.model_config)]
    digest = blake3(json.dumps(about, sort_keys=True).encode())
    for layer in model.layers:
        digest.update(_layer_digest(layer))
    return digest.update(weights).hexdigest()


def configuration(vllm_config: VllmConfig) -> dict[str, Any]:
    """What vLLM resolved that changes hidden states, as plain data: the same for the same model elsewhere."""
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    return {
        "hf_config": _significant(model.hf_config.to_dict()),
        "quantization": plain(model.quantization),
        "quantization_config": plain(getattr(model, "quantization_config", None)),
        "attention_dtype": plain(getattr(model, "override_attention_dtype", None)),
        "kv_dtype": _dtype_name(model.dtype if cache_dtype == "auto" else cache_dtype),
    }


def _significant(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face configuration, and those within it (`text_config`), without what has no effect."""
    return {name: _significant(value) if name.endswith("_config") and name not in _QUANTISATION
            and isinstance(value, Mapping) else plain(value)
            for name, value in hf_config.items() if name not in _NO_EFFECT}


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def sink_ids(model_config: Any) -> list[int]:
    """What chunks that serve any prompt are encoded behind; empty where the engine runs without a tokenizer."""
    tokenizer = load_tokenizer(model_config)
    return [] if tokenizer is None else SegmentTokenizer(tokenizer).sink_ids


def plain(value: Any) -> Any:
    """A configuration value as JSON knows it.  An object of a kind not known here counts by its class."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(inner) for inner in value), key=repr)
    if isinstance(value, Sequence):
        return [plain(inner) for inner in value]
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return plain(type(value))


def _layer_digest(layer: Layer) -> bytes:
    rotation = layer.rotation
    about = [layer.attention.num_kv_heads, layer.attention.head_size, layer.window, layer.soft_cap, layer.scale,
             rotation.name, getattr(rotation, "neox", None)]
    digest = blake3(json.dumps(about).encode())
    if isinstance(rotation, Rotation):
        for table in (rotation.cos, rotation.sin):
            digest.update(table[:_TABLE_ROWS].cpu().contiguous().numpy().tobytes())
    return digest.digest()
