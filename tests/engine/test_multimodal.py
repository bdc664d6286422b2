"""Multimodal models: text requests are blended (test_conformance.py), requests with an image are not and say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from blendrag import SamplingParams
from blendrag.blend_params import BLEND_PARAMS_KEY
from tests.engine.conformance import family_engine
from tests.engine.families import build, named
from tests.engine.texts import PASSAGES


def test_a_request_with_an_image_is_prefilled_in_full(engine_pool: Any, tmp_path: Path) -> None:
    from PIL import Image

    family = named("Idefics 3, text requests")
    engine = family_engine(engine_pool.get, family, build(family, tmp_path / "model"))
    engine.encode(PASSAGES[:1])
    image = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=numpy.uint8))
    text = "<image>" + PASSAGES[0]
    span = [10, len(engine.tokens.chunk_ids(PASSAGES[0]))]
    answers = []
    for marks in ({}, {"kv_transfer_params": {BLEND_PARAMS_KEY: {"spans": [span], "policy": {"policy": "none"}}}}):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=marks)
        prompt = {"prompt": text, "multi_modal_data": {"image": image}, "cache_salt": str(bool(marks))}
        *_, output = engine._start().submit(prompt, params)
        answers.append(output)
    plain, marked = answers
    assert marked.outputs[0].token_ids == plain.outputs[0].token_ids
    [chunk] = marked.kv_transfer_params[BLEND_PARAMS_KEY]["chunks"]
    assert (chunk["reused"], chunk["reason"]) == (False, "multimodal request")
