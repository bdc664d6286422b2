"""Ways in which each attention layer's keys may depend on their position, read off the model's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from blendrag.errors import ModelError
from blendrag.runtime.model.rotation import NoRotation, Rotation, TransformersRotation

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LayerRotations:
    """Finds the rotary embeddings of a model; layers that use one module share its `Rotation`, as they share angles."""

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig) -> None:
        self._model = model
        self._config = vllm_config.model_config
        self._wrapped: dict[tuple[int, str | None], Rotation] = {}
        self._variants: dict[tuple[int, int], list[Rotation]] = {}
        self._none = NoRotation()
        self._layers = 0
        shared = [module for module in model.modules() if _is_rotary(module)]
        self._shared = [module for module in shared if hasattr(module, "cos_sin_cache") or _frequencies(module)]

    def of(self, name: str, head_size: int) -> list[Rotation | NoRotation]:
        """Of the next layer, called `name`: the most likely one first, and none at all last.

        Raises:
            ModelError: the layer's only rotary embedding is none that a fixed table describes.
        """
        index, self._layers = self._layers, self._layers + 1
        parent = self._model.get_submodule(name.rpartition(".")[0])
        own = [child for child in parent.children() if _is_rotary(child)]
        found: list[Rotation] = []
        errors: list[ModelError] = []
        for module in own or self._shared:
            for layer_type in self._types(module, index):
                try:
                    found.append(self._wrap(module, layer_type))
                except ModelError as error:
                    errors.append(error)
        if errors and not found and len(own or self._shared) == 1:
            raise errors[0]
        found = [rotation for rotation in found if rotation.dimensions <= head_size]
        # A model that gives positions otherwise is found out by the probe.
        return [*found, *(other for rotation in found for other in self._others(rotation, head_size)), self._none]

    def _types(self, module: torch.nn.Module, index: int) -> list[str | None]:
        """The layer types for which a module has angles of its own, the layer's own type first."""
        types = sorted(_frequencies(module) - {""})
        every = getattr(self._config.hf_text_config, "layer_types", None) or ()
        own = every[index] if index < len(every) else None
        return sorted(types, key=lambda kind: kind != own) or [None]

    def _wrap(self, module: torch.nn.Module, layer_type: str | None) -> Rotation:
        key = id(module), layer_type
        if key not in self._wrapped:
            length = self._config.max_model_len
            rotation = (TransformersRotation(module, length, self._config.dtype, layer_type) if _frequencies(module)
                        else Rotation(module, self._config.dtype))
            if len(rotation.cos) < length:
                raise ModelError(f"the rotary embedding {rotation.name} has {len(rotation.cos)} positions and "
                                 f"max_model_len is {length}: set max_model_len to {len(rotation.cos)} or less")
            self._wrapped[key] = rotation
        return self._wrapped[key]

    def _others(self, rotation: Rotation, head_size: int) -> list[Rotation]:
        key = id(rotation), head_size
        if key not in self._variants:
            self._variants[key] = rotation.variants(head_size)
        return self._variants[key]


def _is_rotary(module: Any) -> bool:
    return hasattr(module, "cos_sin_cache") or "Rotary" in type(module).__name__


def _frequencies(module: torch.nn.Module) -> set[str]:
    """Layer types of a transformers module's frequencies (`sliding_attention_inv_freq`); "" for `inv_freq`."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    names = [name for name in names if name.endswith("inv_freq") and not name.endswith("original_inv_freq")]
    return {name.removesuffix("inv_freq").rstrip("_") for name in names}
