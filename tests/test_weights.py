"""Models that differ anywhere in their weights have different digests; the same weights have the same one anywhere."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from blendrag.errors import ModelError
from blendrag.runtime.compat import before_weight_processing
from blendrag.runtime.model import weights
from blendrag.runtime.model.weights import LoadedWeights, block_sums, state_digest, tensor_digest, weights_digest

pytestmark = pytest.mark.usefixtures("one_thread")


def make_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 5, bias=False))
    model.register_buffer("scales", torch.rand(3))
    model.register_buffer("table", torch.rand(7), persistent=False)
    return model.to(torch.bfloat16)


def change(parameter: str, place: tuple[int, ...]) -> nn.Module:
    """A model that differs in the last bit of one element."""
    model = make_model()
    bits = model.state_dict()[parameter].view(torch.int16)
    bits[place] ^= 1
    return model


@pytest.mark.parametrize(("parameter", "place"), [("0.weight", (49, 15)), ("1.weight", (11, 3)), ("1.bias", (7,)),
                                                  ("2.weight", (0,)), ("3.weight", (4, 23)), ("scales", (2,))])
def test_one_bit_of_one_element_makes_another_model(parameter: str, place: tuple[int, ...]) -> None:
    assert weights_digest(change(parameter, place)) != weights_digest(make_model())


def test_exchanged_elements_make_another_model() -> None:
    model = make_model()
    weight = model.state_dict()["3.weight"]
    weight[1, [2, 9]] = weight[1, [9, 2]]
    assert weights_digest(model) != weights_digest(make_model())


def test_exchanged_layers_make_another_model() -> None:
    torch.manual_seed(1)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    assert weights_digest(nn.Sequential(first, second)) != weights_digest(nn.Sequential(second, first))


def test_equal_weights_are_one_model() -> None:
    assert weights_digest(make_model()) == weights_digest(copy.deepcopy(make_model()))


def test_what_follows_from_the_configuration_does_not_count() -> None:
    model: Any = make_model()
    model.table += 1
    assert weights_digest(model) == weights_digest(make_model())


def test_layers_that_adapters_wrap_keep_their_names() -> None:
    class Wrapped(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    model = make_model()
    model[1] = Wrapped(model[1])  # type: ignore[index, operator]
    assert weights_digest(model) == weights_digest(make_model())


def test_a_parameter_without_elements_is_refused_by_name() -> None:
    model: Any = make_model()
    model[3].weight = nn.Parameter(torch.empty(0))
    with pytest.raises(ModelError, match=r"the parameter 3\.weight has no elements"):
        weights_digest(model)
    assert state_digest(model) is None


def test_what_changes_in_a_model_that_runs_is_seen() -> None:
    model: Any = make_model()
    model[1].packed = torch.rand(4)  # a tensor that is neither a parameter nor a buffer
    digests = [state_digest(model)]
    for tensor in (model.table, model[1].packed, model[2].weight.data):
        tensor += 1
        digests.append(state_digest(model))
    assert len(set(digests)) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_views_are_digested_as_their_copies(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).reshape(6, 10).to(dtype)
    assert tensor_digest(tensor.T) == tensor_digest(tensor.T.contiguous())
    assert tensor_digest(tensor[1:, 3:]) == tensor_digest(tensor[1:, 3:].clone())


# Sums on a device, computed on the CPU.


def sums(raw: torch.Tensor) -> list[int]:
    return block_sums(raw).flatten().tolist()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four words each."""
    monkeypatch.setattr(weights, "_BLOCK_WORDS", 4)
    weights._factors.cache_clear()
    monkeypatch.setattr(weights, "_factors", weights._factors.__wrapped__)


@pytest.mark.usefixtures("small_blocks")
def test_a_sum_is_that_of_the_words_each_times_an_odd_factor() -> None:
    words = torch.tensor([1, -2, 3, 2**31 - 1, -(2**31), 7], dtype=torch.int32)
    factors = [[number % 2**64 for number in row] for row in weights._factors(torch.device("cpu")).tolist()]
    assert all(factor % 2 for row in factors for factor in row)
    assert factors[0][0] == 0xE220A8397B1DCDAF, "the first number of SplitMix64 from 0"
    blocks = [words[:4].tolist(), words[4:].tolist()]
    expected = [sum(word * factor for word, factor in zip(block, row, strict=False)) % 2**64
                for block in blocks for row in factors]
    assert [number % 2**64 for number in sums(words.view(torch.uint8))] == expected


@pytest.mark.usefixtures("small_blocks")
def test_each_bit_and_each_exchange_changes_a_sum() -> None:
    raw = torch.randint(0, 256, (43,), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    found = {tuple(sums(raw))}
    changed = 0
    for place in range(len(raw)):
        for bit in range(8):
            other = raw.clone()
            other[place] ^= 1 << bit
            found.add(tuple(sums(other)))
            changed += 1
        for partner in range(place):
            if raw[place] != raw[partner]:
                other = raw.clone()
                other[[place, partner]] = raw[[partner, place]]
                found.add(tuple(sums(other)))
                changed += 1
    assert len(found) == 1 + changed


@pytest.mark.usefixtures("small_blocks")
def test_bytes_that_are_no_whole_words_or_lie_between_them_count_all_the_same() -> None:
    raw = torch.arange(22, dtype=torch.uint8)
    assert sums(raw[3:]) == sums(raw[3:].clone())
    assert sums(raw[:21]) != sums(raw[:20])


# When they are taken.


def test_weights_are_digested_before_vllm_processes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever loader, one that is imported only now included; afterwards vLLM is as it was."""
    import vllm.model_executor.model_loader.base_loader as base
    import vllm.model_executor.model_loader.utils as utils

    def pack(model: Any, *_: Any) -> None:
        model[3].weight = nn.Parameter(torch.empty(0))

    monkeypatch.setattr(utils, "process_weights_after_loading", pack)
    monkeypatch.setattr(base, "process_weights_after_loading", pack)
    late: Any = ModuleType("vllm.model_executor.model_loader.late")
    loaded, model, other = LoadedWeights(), make_model(), change("1.bias", (0,))
    with before_weight_processing(loaded.take):
        monkeypatch.setitem(sys.modules, late.__name__, late)
        late.process = utils.process_weights_after_loading
        base.process_weights_after_loading(model, None, None)  # type: ignore[arg-type]
        late.process(other)
    assert utils.process_weights_after_loading is base.process_weights_after_loading is late.process is pack
    assert loaded.of(model) == weights_digest(make_model())
    assert loaded.of(other) == weights_digest(change("1.bias", (0,)))


def test_a_model_that_no_loader_processes_is_digested_as_it_is() -> None:
    assert LoadedWeights().of(make_model()) == weights_digest(make_model())


def test_weights_that_another_process_holds_are_digested_once_they_are_here() -> None:
    loaded = LoadedWeights()
    loaded.take(make_model().to("meta"))
    assert loaded.of(make_model()) == weights_digest(make_model())
