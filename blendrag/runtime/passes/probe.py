"""Runs the model at two places of a prompt, to see that its keys move as we believe.

What rotates a layer's keys is read off the model's modules, and modules can mislead: some models own a rotary
embedding that certain layers do not use (Cohere 2, EXAONE 4), others rotate elsewhere, or add positions to the
hidden states (GPT-2).  Attention with a rotary embedding sees nothing but distances, so the same few tokens give the
same unrotated keys wherever they stand, in every layer.  That is tried out here, once, when the engine starts.
"""

from __future__ import annotations

import torch

from blendrag.errors import ModelError
from blendrag.runtime.model.blend_model import BlendModel, Layer
from blendrag.runtime.model.rotation import NoRotation, Rotation, TransformersRotation
from blendrag.runtime.passes.attention import attend
from blendrag.runtime.passes.forward import Forward, Lane, Part
from blendrag.runtime.passes.rows import Rows

_TOKENS = 16
_FAR = 8009
# Of the keys' length.  bf16 costs up to .03 in 30 layers; not rotating at all costs from .15 (Gemma 3, whose large key
# components turn slowly) to more than 1.
_LIMIT = 0.2
_LIMIT_ALONE = 0.05  # where there is nothing to compare with
_CLEARLY = 0.5


class _Keys(Lane):
    """A few tokens that see nothing but themselves, and the keys they get in each layer."""

    def __init__(self, ids: torch.Tensor, first: int) -> None:
        self.ids = ids
        self.positions = torch.arange(first, first + len(ids), device=ids.device)
        self.keys: list[torch.Tensor] = []
        self._rows = Rows(torch.arange(len(ids), device=ids.device), len(ids))

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        self.keys.append(k.clone())
        return attend(q, k, v, self._rows, scale=layer.scale, window=layer.window, soft_cap=layer.soft_cap)


def settle_rotations(model: BlendModel) -> None:
    """Compares each layer's rotation with what the layer does; layers that do not rotate are told so.

    Raises:
        ModelError: keys depend on their position in another way.
    """
    config = model.vllm_config
    count = min(_TOKENS, config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len // 2)
    far = min(_FAR, config.model_config.max_model_len - count)
    ids = torch.arange(count, device=model.device) * 101 % (config.model_config.get_vocab_size() // 2)
    forward = Forward(model, eager=True)
    near, away = _Keys(ids, 0), _Keys(ids, far)
    for lane in (near, away):
        forward.run([lane])
    rotations: dict[int, list[Rotation | NoRotation]] = {}  # those of one module are shared, as their angles are
    for layer, here, there in zip(model.layers, near.keys, away.keys, strict=True):
        errors = {rotation: _error(rotation.rotate(rotation.unrotate(here, near.positions), away.positions), there)
                  for rotation in rotations.setdefault(id(layer.rotation), _candidates(layer.rotation))}
        best = min(errors, key=lambda rotation: errors[rotation])
        if errors[best] < _CLEARLY * errors[layer.rotation]:
            layer.rotation = best
        if not errors[layer.rotation] < (_LIMIT if len(errors) > 1 else _LIMIT_ALONE):
            raise ModelError(f"the keys of layer {layer.name} depend on their position in a way that blending does not "
                             "know (learned positions, or a rotary embedding outside the layer): use another model")


def _candidates(rotation: Rotation | NoRotation) -> list[Rotation | NoRotation]:
    """What a layer may do."""
    if isinstance(rotation, NoRotation):
        return [rotation]
    paired = [rotation.paired_otherwise()] if isinstance(rotation, TransformersRotation) else []
    return [rotation, *paired, NoRotation()]


def _error(moved: torch.Tensor, fresh: torch.Tensor) -> float:
    """How far moved keys are from fresh ones, relative to their length; the median over tokens."""
    moved, fresh = moved.float().flatten(1), fresh.float().flatten(1)
    return float(((moved - fresh).norm(dim=1) / fresh.norm(dim=1).clamp_min(1e-12)).median())
