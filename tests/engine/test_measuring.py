"""What prefills and passes cost is measured in the worker, with nothing left behind."""

import logging
from dataclasses import asdict
from math import isfinite
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from blendrag import BlendPrompt, Chunk, SamplingParams
from blendrag.runtime.messages import BlendMetadata
from blendrag.runtime.passes.measuring import measure, warm_up
from blendrag.runtime.passes.trial_steps import TrialSteps
from tests.engine.texts import PASSAGES, QUESTION, SYSTEM

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def measured(worker: Any) -> Any:
    connector = get_kv_transfer_group()
    steps = TrialSteps(worker, BlendMetadata(generation=connector.fingerprint.generation))
    return measure(connector.worker.blender, steps, connector.config)


def in_worker(engine: Any, work: Any) -> Any:
    engine.reset_prefix_cache()  # trial steps write to blocks that it may hold
    [result] = engine._start().call(lambda llm: llm.collective_rpc(work))
    return result


def test_costs_are_measured_and_answers_stay(engine):
    engine.encode(PASSAGES, prefix=SYSTEM)
    prompt = BlendPrompt(SYSTEM, *map(Chunk, PASSAGES), QUESTION)
    [before] = engine.generate(prompt, GREEDY)
    costs = in_worker(engine, measured)
    engine.reset_prefix_cache()
    [after] = engine.generate(prompt, GREEDY)
    assert (after.token_ids, after.stats.rows) == (before.token_ids, before.stats.rows)
    assert all(isfinite(value) for value in asdict(costs).values())
    assert all(value >= 0 for name, value in asdict(costs).items() if not name.endswith("_step"))
    assert costs.prefill(2000) > costs.prefill(200) > 0


def test_what_cannot_be_measured_is_said_in_one_line(engine, caplog):
    caplog.set_level(logging.WARNING, "blendrag")
    assert in_worker(engine, lambda worker: measure(get_kv_transfer_group().worker.blender, None, None)) is None
    assert [record.message for record in caplog.records if "could not be measured" in record.message]


def test_passes_are_tried_out_before_there_are_requests(engine, caplog):
    """As on a GPU, where kernels are compiled meanwhile."""
    caplog.set_level(logging.WARNING, "blendrag")

    def tried(worker: Any) -> None:
        connector = get_kv_transfer_group()
        steps = TrialSteps(worker, BlendMetadata(generation=connector.fingerprint.generation))
        warm_up(connector.worker.blender, steps, connector.config)

    in_worker(engine, tried)
    assert not caplog.records
    in_worker(engine, lambda worker: warm_up(get_kv_transfer_group().worker.blender, None, None))
    assert [record.message for record in caplog.records if "could not be tried out" in record.message]
