"""What entries are named after changes with the weights and with each reset, and nothing else changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from blendrag.runtime.fingerprint import Fingerprint, fingerprint_of
from blendrag.runtime.model.identity import configuration, plain


def started(model: str = "a") -> tuple[Fingerprint, list[str]]:
    fingerprint, values = Fingerprint(), []
    fingerprint.start(model)
    fingerprint.subscribe(values.append)
    return fingerprint, values


def test_it_is_the_models_at_first() -> None:
    fingerprint, values = started()
    assert (fingerprint.value, fingerprint.own, values) == ("a", False, [])


def test_each_reset_gives_another_one_that_no_other_engine_has() -> None:
    (fingerprint, values), (other, _) = started(), started()
    fingerprint.reset(), fingerprint.reset(), other.reset()
    assert len({"a", *values, other.value}) == 4
    assert (fingerprint.value, fingerprint.own) == (values[-1], True)


def test_other_weights_after_a_reset_are_others_still() -> None:
    fingerprint, values = started()
    fingerprint.reset()
    fingerprint.change(model="b")
    assert fingerprint.value == values[1] != values[0]
    assert fingerprint.value not in ("a", "b")


def test_what_does_not_change_is_not_reported() -> None:
    fingerprint, values = started()
    fingerprint.change(model="a", generation="")
    assert values == []


def test_the_halves_of_an_engine_agree_by_what_they_send_each_other() -> None:
    (scheduler, _), (worker, _) = started(), started()
    scheduler.reset()
    worker.change(model="b")
    worker.change(generation=scheduler.generation)
    scheduler.change(model=worker.model)
    assert scheduler.value == worker.value


def test_parts_of_one_engine_share_it() -> None:
    first, other = fingerprint_of("one"), fingerprint_of("two")
    assert fingerprint_of("one") is first is not other


def test_an_engine_that_starts_again_under_its_name_starts_anew() -> None:
    fingerprint, values = started()
    fingerprint.reset()
    fingerprint.close()
    fingerprint.start("a")
    assert (fingerprint.value, fingerprint.own, len(values)) == ("a", False, 1)


# The configuration.


class Scaling(enum.Enum):
    LINEAR = "linear"


@dataclass
class Quantization:
    bits: int = 4
    ignored: set[str] = field(default_factory=lambda: {"lm_head", "embed"})
    dtype: str = "fp8_e4m3"


def test_configuration_values_are_plain_data() -> None:
    value = {"eps": 1e-5, "rope": {"type": Scaling.LINEAR, 0: [1.0, 2.0]}, "quantization": Quantization(),
             "dtype_of_scales": torch.float16, "object": object(), "class": Quantization, "none": None}
    assert plain(value) == {
        "eps": 1e-5, "rope": {"type": "linear", "0": [1.0, 2.0]},
        "quantization": {"bits": 4, "ignored": ["embed", "lm_head"], "dtype": "fp8_e4m3"},
        "dtype_of_scales": "torch.float16", "object": "builtins.object", "class": f"{__name__}.Quantization",
        "none": None}


def resolved(hf_config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    cache = SimpleNamespace(cache_dtype=settings.pop("cache_dtype", "auto"))
    model = {"hf_config": SimpleNamespace(to_dict=lambda: hf_config), "quantization": None,
             "dtype": torch.bfloat16} | settings
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(**model), cache_config=cache)
    return configuration(vllm_config)


def test_where_a_model_lies_and_who_wrote_it_does_not_count() -> None:
    here = {"_name_or_path": "/a", "transformers_version": "4", "torch_dtype": "float32", "rms_norm_eps": 1e-5,
            "text_config": {"_name_or_path": "/a", "hidden_size": 4}}
    there = {"_name_or_path": "/b", "transformers_version": "5", "dtype": "bfloat16", "rms_norm_eps": 1e-5,
             "text_config": {"_name_or_path": "", "hidden_size": 4}}
    assert resolved(here) == resolved(there)


def test_every_other_value_counts() -> None:
    config = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "hidden_act": "silu", "residual_multiplier": 0.5,
              "rope_parameters": {"rope_theta": 1e4}, "an_unknown_one": 1,
              "text_config": {"hidden_size": 4}, "quantization_config": {"weight": {"dtype": "fp8_e4m3"}}}
    for name in config:
        assert resolved(config | {name: "other"}) != resolved(config), name
    assert resolved(config, quantization="fp8") != resolved(config)
    assert resolved(config, cache_dtype="float16") != resolved(config) == resolved(config, cache_dtype="bfloat16")
