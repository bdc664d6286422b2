"""Runs the model at several places of a prompt, to see that keys and values depend on their position as expected.

What rotates a layer's keys is read off the model's modules, and modules can mislead: some models own a rotary
embedding that certain layers do not use (Cohere 2, EXAONE 4), others norm keys after the rotation (HunYuan), scale
values by position (Moondream 3), or add positions to the hidden states (GPT-2).  So it is tried out, once, when the
engine starts: a few tokens that see nothing but themselves run at several places at once, and each layer's queries,
keys and values at every place are compared with those at the first.  Queries and keys must differ by the rotation
alone, values not at all.

All places go on with the attention output of the first.  So a layer's inputs are the same at every place, rounding
does not add up over layers, experts are chosen alike, and what a layer does wrong is seen in this very layer.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import torch

import blendrag
from blendrag.errors import BlendError, ModelError
from blendrag.runtime.model.blend_model import BlendModel, Layer
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes.attention import attend
from blendrag.runtime.passes.forward import Forward, Lane, Part
from blendrag.runtime.passes.rows import Rows

_TOKENS = 16
_LIMITS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far apart two places may be, in units of a component's size.  On a CPU, rounding costs 4e-7, .0015 and .012."""
_CLEARLY = 0.5
_PACKAGE = Path(blendrag.__file__).parent


@dataclass(frozen=True)
class _Errors:
    """How far the places of one layer are from the first, float32 [places].

    Attributes:
        keys, queries: for each way in which positions may be applied.
    """

    keys: list[torch.Tensor]
    queries: list[torch.Tensor]
    values: torch.Tensor


class _Places(Lane):
    """A few tokens at several places, which see nothing but those of their own place."""

    def __init__(self, ids: torch.Tensor, places: list[int]) -> None:
        self._tokens, self._places = len(ids), len(places)
        self.ids = ids.repeat(len(places))
        self.positions = torch.cat([torch.arange(at, at + len(ids), device=ids.device) for at in places])
        self.errors: dict[int, _Errors] = {}
        self._rows = Rows(torch.arange(len(ids), device=ids.device), len(ids))

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        if index in self.errors:
            raise ModelError(f"blending does not support layers that run more than once ({layer.name}): use another "
                             "model")
        self.errors[index] = _Errors([self._moved(rotation, k) for rotation in layer.rotations],
                                     [self._moved(rotation, q) for rotation in layer.rotations],
                                     self._compare(v, v[: self._tokens].repeat(self._places, 1, 1)))
        q, k, v = q[: self._tokens], k[: self._tokens], v[: self._tokens]
        out = attend(q, k, v, self._rows, scale=layer.scale, window=layer.window, soft_cap=layer.soft_cap)
        return out.repeat(self._places, 1, 1)

    def _moved(self, rotation: Rotation | NoRotation, fresh: torch.Tensor) -> torch.Tensor:
        """Moves those of the first place to all places and compares them with the fresh ones there."""
        here = self.positions[: self._tokens]
        bare = rotation.unrotate(fresh[: self._tokens].float(), here).repeat(self._places, 1, 1)
        return self._compare(fresh, rotation.rotate(bare, self.positions))

    def _compare(self, fresh: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """The largest difference within a token relative to the component's size, the median over a place's tokens."""
        fresh = fresh.float()
        size = fresh.square().mean(0).sqrt()  # [heads, head size]; a large component must not hide a small one
        size = torch.maximum(size, 1e-2 * size.square().mean().sqrt()).clamp_min(1e-30)
        furthest = ((moved - fresh).abs() / size).flatten(1).amax(1)
        return furthest.view(self._places, self._tokens).median(1).values


def settle_rotations(model: BlendModel) -> None:
    """Chooses, for each layer, the way of applying positions that fits what the layer does.

    Raises:
        ModelError: keys, values or queries depend on their position in another way, or the model does not run.
    """
    config = model.vllm_config
    forward = Forward(model, eager=True)
    length = config.model_config.max_model_len
    places = _places(length, min(_TOKENS, length // 2), forward.max_rows)
    count = max(1, min(_TOKENS, length // 2, forward.max_rows // len(places)))
    ids = torch.arange(count, device=model.device) * 101 % (config.model_config.get_vocab_size() // 2)
    lane = _Places(ids, places)
    try:
        forward.run([lane])
    except BlendError:
        raise
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
            raise
        place = "/".join(Path(frame.f_code.co_filename).parts[-3:])
        message = str(error) or "no message"
        raise ModelError(f"vLLM's own code for this model fails in a trial run ({type(error).__name__}: {message}, in "
                         f"{place}, line {line}): see whether vLLM alone runs the model on this machine") from error
    limit = _LIMITS.get(model.dtype, max(_LIMITS.values()))
    for index, layer in enumerate(model.layers):
        if index not in lane.errors:
            raise ModelError(f"blending does not support layers that do not run for each token ({layer.name}): use "
                             "another model")
        _settle(layer, lane.errors[index], places, limit)


def _places(length: int, count: int, max_rows: int) -> list[int]:
    """Where the tokens are tried out: the prompt's beginning, its end, and what lies between at growing distances."""
    last = length - count
    places = sorted({place for place in (0, 1, 37, length // 16, length // 4, length // 2, last) if place <= last})
    if max_rows < len(places):
        raise ModelError(f"a step of {max_rows} tokens is too short to try the model out: set max_num_batched_tokens "
                         f"to {len(places)} or more")
    return places


def _settle(layer: Layer, errors: _Errors, places: list[int], limit: float) -> None:
    keys = [float(error.max()) for error in errors.keys]
    best = min(range(len(keys)), key=lambda number: keys[number] if isfinite(keys[number]) else inf)
    chosen = best if not keys[0] < limit or keys[best] < _CLEARLY * keys[0] else 0
    for what, error in (("keys", errors.keys[chosen]), ("values", errors.values), ("queries", errors.queries[chosen])):
        if not bool((error < limit).all()):
            _refuse(layer, layer.rotations[chosen], what, error, places, limit)
    layer.choose(layer.rotations[chosen])


def _refuse(layer: Layer, rotation: Rotation | NoRotation, what: str, errors: torch.Tensor, places: list[int],
            limit: float) -> None:
    first = next(number for number, error in enumerate(errors.tolist()) if not error < limit)
    turns = what != "values" and isinstance(rotation, Rotation)
    how = f"turn by the rotary embedding ({rotation.name}) alone" if turns else "stay the same"
    remedy = "use another model"
    if first > 1 and places[first] > 64:  # right for short prompts, as with scales that begin at some length
        remedy += f", or set max_model_len to {places[first - 1]} or less"
    raise ModelError(
        f"the {what} of layer {layer.name} depend on their position in a way that blending does not know: from "
        f"position 0 to {places[first]} they should {how}, and differ by {float(errors[first]):.2g} of their size "
        f"(limit {limit:g}): {remedy}")
