"""At start-up the model is tried out: whatever depends on its position otherwise than by rotation is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendEngine
from blendrag.errors import ModelError
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.model.rotation import NoRotation
from blendrag.runtime.passes.probe import settle_rotations
from tests.engine.together import worker_side

LAYER = 4  # of 8, which have 9 heads, 3 KV heads of size 64
COMPONENT = torch.nn.functional.one_hot(torch.tensor(7), 192).view(3, 64)
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


@contextmanager
def changed(attention: Any, change: Change) -> Iterator[None]:
    """Lets a layer's attention take `change(positions, q, k, v)`, of which each is [rows, heads, 64]."""
    positions: list[torch.Tensor] = []

    def stash(module: Any, args: Any, kwargs: Any) -> None:
        positions[:] = [kwargs["positions"]]

    def replaced(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        heads = [tensor.view(len(tensor), -1, 64) for tensor in args[:3]]
        found = change(positions[0].float()[:, None, None], *heads)
        return *(tensor.flatten(1) for tensor in found), *args[3:]

    with ExitStack() as stack:
        stack.callback(attention.register_forward_pre_hook(stash, with_kwargs=True).remove)
        stack.callback(attention.attn.register_forward_pre_hook(replaced).remove)
        yield


def probed(engine: BlendEngine, change: Change | None = None) -> BlendModel:
    """The engine's model after another probe, with one layer changed."""
    def run(_: Any) -> BlendModel:
        model = copy.copy(get_kv_transfer_group().worker.blender.model)
        model.layers = [replace(layer, rotations=[layer.rotation, *layer.rotation.variants(64), NoRotation()])
                        for layer in model.layers]
        with ExitStack() as stack:
            if change is not None:
                attention = model.module.get_submodule(model.layers[LAYER].name.rpartition(".")[0])
                stack.enter_context(changed(attention, change))
            settle_rotations(model)
        return model

    return engine._start().call(run)  # type: ignore[no-any-return]


def from_position(start: int, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda positions: torch.where(positions >= start, factor, 1.0)


WRONG: dict[str, tuple[Change, str]] = {
    "values scaled by position": (lambda p, q, k, v: (q, k, v * (1 + 0.01 * torch.log1p(p))), "values"),
    "values that end differ a little": (lambda p, q, k, v: (q, k, v * from_position(1600, 1.003)(p)), "values"),
    "queries scaled from some position on": (lambda p, q, k, v: (q * from_position(900, 1.07)(p), k, v), "queries"),
    "keys scaled component by component after the rotation":
        (lambda p, q, k, v: (q, k * (1 + 0.01 * torch.sin(torch.arange(64.0))), v), "keys"),
    "one component of one head": (lambda p, q, k, v: (q, k + 0.02 * k.abs().mean() * torch.sin(p) * COMPONENT, v),
                                  "keys"),
    "keys to which the position is added": (lambda p, q, k, v: (q, k + 0.001 * p, v), "keys"),
    "keys that are not numbers far away": (lambda p, q, k, v: (q, k / from_position(1600, 0.0)(p), v), "keys"),
}


def test_a_model_that_only_rotates_keeps_its_rotations(engine: BlendEngine) -> None:
    model = probed(engine)
    assert [layer.rotations for layer in model.layers] == [
        layer.rotations for layer in worker_side(engine).blender.model.layers]


@pytest.mark.parametrize(("change", "what"), WRONG.values(), ids=WRONG)
def test_what_else_depends_on_the_position_is_refused_with_the_layer(change: Change, what: str,
                                                                     engine: BlendEngine) -> None:
    message = rf"the {what} of layer model\.layers\.{LAYER}\..* depend on their position .*: use another model"
    with pytest.raises(ModelError, match=message):
        probed(engine, change)


def test_what_begins_at_some_position_may_be_avoided(engine: BlendEngine) -> None:
    with pytest.raises(ModelError, match=r"from position 0 to 1024 .* or set max_model_len to 512 or less"):
        probed(engine, WRONG["queries scaled from some position on"][0])


def test_a_layer_without_positions_is_noticed(engine: BlendEngine) -> None:
    rotation = engine._start().call(lambda _: get_kv_transfer_group().worker.blender.model.layers[LAYER].rotation)

    def undone(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = p.flatten().long()
        return rotation.unrotate(q, positions), rotation.unrotate(k, positions), v

    model = probed(engine, undone)
    assert isinstance(model.layers[LAYER].rotation, NoRotation)
    assert model.layers[LAYER - 1].rotation is model.layers[LAYER + 1].rotation is rotation
