"""Which requests are blended, and which are left to vLLM."""

from dataclasses import replace

import numpy as np
import pytest

from blendrag.policies import CacheBlend, Exact, First, Full, NoRecompute, Policy, Query
from blendrag.runtime.costs import Costs, Scoring
from blendrag.runtime.messages import Placement
from blendrag.runtime.planning.gate import Gate, work_of
from blendrag.runtime.planning.placing import Plan
from blendrag.stats import BlendStats

LAYERS = 10
CPU = Costs(vllm_floor=0.03, vllm_step=0.02, row=0.001, vllm_pair=1e-7, pass_floor=0.03, pass_step=0.02,
            pass_row=0.001, pass_pair=1e-7, weigh=1e-8, place=2e-5, piece=2e-4, drift=2e-5, again=0.0, disk=1e-5,
            step_tokens=2048.0)
SMALL_ON_GPU = replace(CPU, vllm_floor=0.005, vllm_step=0.003, row=1e-5, vllm_pair=0.0, pass_floor=0.03,
                       pass_step=0.03, pass_row=1e-5, pass_pair=0.0, place=1e-6, piece=1e-5, drift=1e-6, again=1.0)


def plan_of(tokens=1000, chunks=8, length=100, policy: Policy | None = None, start=100, exact=(), **options) -> Plan:
    """A prompt that begins with `start` tokens that are not stored; `exact` numbers its exact chunks."""
    placements = [Placement(start + n * length, start + (n + 1) * length, f"key{n}", n in exact) for n in range(chunks)]
    return Plan(policy or Query(), BlendStats(prompt_tokens=tokens), np.arange(tokens), placements,
                question_start=start + chunks * length, **options)


def test_a_prompt_of_stored_chunks_is_blended():
    decision = Gate(CPU, LAYERS).decide(plan_of())
    assert decision.blend
    assert 0 < decision.blend_s < decision.prefill_s == pytest.approx(CPU.prefill(1000))


def test_what_is_quick_anyway_is_left_to_vllm():
    decision = Gate(SMALL_ON_GPU, LAYERS).decide(plan_of())
    assert not decision.blend
    assert 0 < decision.prefill_s < decision.blend_s


def test_a_short_chunk_in_a_short_prompt_is_left_to_vllm():
    assert not Gate(CPU, LAYERS).decide(plan_of(tokens=200, chunks=1, length=40)).blend


def test_what_vllm_has_cached_counts():
    gate = Gate(CPU, LAYERS)
    assert gate.decide(plan_of(), cached=0).blend
    decision = gate.decide(plan_of(), cached=900)
    assert not decision.blend
    assert decision.prefill_s == pytest.approx(CPU.prefill(100, 900))


def test_what_a_pass_reads_from_the_paged_cache_it_does_not_compute():
    plan = plan_of(start=500, chunks=4)
    assert work_of(plan, LAYERS, read=450).fresh == 150
    assert work_of(plan, LAYERS, read=550).placements == 4
    assert work_of(plan, LAYERS, read=650).placements == 3
    gate = Gate(CPU, LAYERS)
    assert gate.decide(plan, cached=450, read=450).blend_s < gate.decide(plan, cached=450).blend_s
    assert not Gate().decide(plan, cached=450).blend
    assert Gate().decide(plan, cached=450, read=450).blend


def test_chunks_on_a_slow_disk_may_be_slower_than_computing_them():
    costs = replace(CPU, disk=0.01)
    assert Gate(costs, LAYERS).decide(plan_of()).blend
    assert not Gate(costs, LAYERS, on_disk=lambda keys: set(keys)).decide(plan_of()).blend


def test_without_costs_fewer_rows_win():
    gate = Gate()
    assert gate.decide(plan_of()).blend
    assert gate.decide(plan_of()).prefill_s == 0.0
    assert not gate.decide(plan_of(), cached=900).blend


def test_a_request_may_ask_for_blending_in_any_case():
    gate = Gate(SMALL_ON_GPU, LAYERS)
    assert gate.decide(plan_of(always=True)).blend
    assert gate.decide(plan_of(always=True)).blend_s > 0
    assert gate.decide(plan_of(policy=Full()), cached=900).blend


def test_a_scoring_pass_over_all_that_follows_the_chunks_is_counted():
    few = plan_of(tokens=4000, chunks=1)
    assert work_of(few, LAYERS).scoring[0].rows == 3800 + 64
    assert not Gate(CPU, LAYERS).decide(few).blend


@pytest.mark.parametrize(("policy", "recomputed", "depths"), [
    (Query(ratio=0.25), 200, [0.8]), (NoRecompute(), 0, []), (First(tokens=16), 128, []), (Exact(), 0, []),
    (CacheBlend(ratio=0.5), 400, [0.2]), (CacheBlend(ratio=(0.5, 0.25), check_layers=(1, 3)), 200, [0.2, 0.4])])
def test_work_is_what_a_policy_asks_for(policy, recomputed, depths):
    exact = range(8) if isinstance(policy, Exact) else ()
    work = work_of(plan_of(policy=policy, exact=exact), LAYERS)
    assert (work.fresh, work.recomputed, work.placements) == (200, recomputed, 8)
    assert [scoring.depth for scoring in work.scoring] == pytest.approx(depths)


def test_exact_chunks_cost_no_rows():
    assert work_of(plan_of(exact=range(8)), LAYERS).scoring == ()
    assert work_of(plan_of(policy=Query(ratio=0.25), exact=range(4)), LAYERS).recomputed == 100


def test_gradual_filtering_scores_fewer_rows_each_time():
    policy = CacheBlend(ratio=(0.5, 0.25), check_layers=(1, 3))
    assert work_of(plan_of(policy=policy), LAYERS).scoring == (Scoring(1000, 0.2), Scoring(600, 0.4))
