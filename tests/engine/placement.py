"""Are stored keys moved to where they belong?  A check that works in every layer of a running engine.

Attention with a rotary embedding sees nothing but distances, so a chunk that sees only itself has the same
unrotated keys, and the same values, wherever it stands.  A stored chunk is placed at several positions, and its KV is
held against what the model itself computes there, in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendEngine
from blendrag.runtime.messages import Placement
from blendrag.runtime.model.blend_model import Layer
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.forward import Forward, Part
from blendrag.runtime.passes.lanes import EncodeLane
from blendrag.runtime.passes.rows import Rows

PLACES = (1, 37, 700)  # and the prompt's end


class _Alone(EncodeLane):
    """A chunk somewhere in a prompt of which it sees nothing but itself; `fresh` are its KV, keys rotated."""

    def __init__(self, model: Any, ids: torch.Tensor, at: int) -> None:
        super().__init__(Context(model, at, ()), ids)
        self._valid = torch.arange(at + len(ids), device=model.device) >= at
        self.fresh: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rows(self, part: Part) -> Rows:
        rows = super().rows(part)
        rows.valid = self._valid
        return rows

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        self.fresh.append((k.clone(), v.clone()))
        return super().attend(index, layer, part, q, k, v)


def _errors(_worker: Any, ids: list[int]) -> list[list[float]]:
    model = get_kv_transfer_group().worker.blender.model
    forward = Forward(model)
    tensor = torch.tensor(ids, device=model.device)
    stored = _Alone(model, tensor, 0)
    forward.run([stored])
    entry = stored.entry()
    errors = []
    for at in (*PLACES, model.vllm_config.model_config.max_model_len - len(ids)):
        there = _Alone(model, tensor, at)
        forward.run([there])
        placed = Context(model, at + len(ids), [(Placement(at, at + len(ids), "", exact=False), entry)])
        errors.append([max(float((ours[at:] - fresh).abs().max() / fresh.abs().max())
                           for ours, fresh in zip(placed.layer(index), kv, strict=True))
                       for index, kv in enumerate(there.fresh)])
    return errors


def placement_errors(engine: BlendEngine, text: str) -> list[list[float]]:
    """Largest difference of placed KV from the model's own, relative to the largest key or value, [places][layers]."""
    ids = engine.tokens.chunk_ids(text)
    [errors] = engine._start().call(lambda inner: inner.collective_rpc(_errors, args=(ids,)))
    return errors  # type: ignore[no-any-return]
