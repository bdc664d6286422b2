"""What a prefill and a blend pass are estimated to take."""

import pickle
from dataclasses import replace

import pytest

from blendrag.runtime.costs import Costs, PassWork, Scoring

COSTS = Costs(vllm_floor=0.02, vllm_step=0.01, row=0.001, vllm_pair=1e-6, pass_floor=0.02, pass_step=0.01,
              pass_row=0.001,
              pass_pair=2e-6, weigh=1e-5, place=1e-5, piece=1e-4, drift=1e-5, again=0.0, disk=1e-4, step_tokens=100.0)
FREE = replace(COSTS, vllm_pair=0.0, pass_pair=0.0, weigh=0.0, place=0.0, piece=0.0, drift=0.0, disk=0.0)
TOKEN = FREE.prefill(1)


def test_a_step_of_few_tokens_takes_as_long_as_its_weights():
    assert FREE.prefill(1) == FREE.prefill(10) == 0.02
    assert FREE.prefill(50) == pytest.approx(0.06)


def test_long_prompts_take_several_steps():
    assert FREE.prefill(250) == pytest.approx(2 * 0.11 + 0.06)


def test_attention_grows_with_what_is_cached_and_cutting_into_steps_leaves_it():
    assert COSTS.prefill(50, 1000) - COSTS.prefill(50) == pytest.approx(50 * 1000 * 1e-6)
    assert COSTS.prefill(250) - FREE.prefill(250) == pytest.approx(250**2 / 2 * 1e-6)


def test_a_pass_costs_its_rows_and_the_step_of_the_last_token():
    assert FREE.blend(PassWork(tokens=300, fresh=40, recomputed=20)) == pytest.approx(0.07 + TOKEN)
    assert FREE.blend(PassWork(tokens=300, fresh=0)) == pytest.approx(0.02 + TOKEN)
    assert FREE.blend(PassWork(tokens=300, fresh=150)) == pytest.approx(0.11 + 0.06 + TOKEN)


def test_a_scoring_pass_costs_its_share_of_the_layers():
    scored = PassWork(tokens=300, fresh=40, scoring=(Scoring(rows=50, depth=0.5),))
    assert FREE.blend(scored) - FREE.blend(replace(scored, scoring=())) == pytest.approx(0.5 * 0.06)


def test_stored_kv_is_placed_once_where_a_scoring_pass_leaves_it_and_else_twice():
    costs = replace(FREE, place=1e-4)
    scored = PassWork(tokens=300, fresh=40, scoring=(Scoring(rows=50, depth=0.5),))
    plain = FREE.blend(scored)
    assert costs.blend(scored) - plain == pytest.approx(300 * 1e-4)
    assert replace(costs, again=1.0).blend(scored) - plain == pytest.approx(1.5 * 300 * 1e-4)


@pytest.mark.parametrize(("more", "seconds"), [
    ({"placements": 11}, 10 * 1e-4), ({"moved": 200}, 200 * 1e-5), ({"on_disk": 100}, 100 * 1e-4),
    ({"pairs": 1000.0}, 1000 * 2e-6)])
def test_everything_else_adds_up(more, seconds):
    work = PassWork(tokens=300, fresh=40)
    assert COSTS.blend(replace(work, **more)) - COSTS.blend(work) == pytest.approx(seconds)


def test_weighing_attention_costs_more_than_attending():
    work = PassWork(tokens=300, fresh=40, scoring=(Scoring(rows=50, depth=0.5, weighed=1500.0),))
    without = replace(work, scoring=(Scoring(rows=50, depth=0.5),))
    assert COSTS.blend(work) - COSTS.blend(without) == pytest.approx(1500 * 1e-5)


def test_costs_travel_between_processes():
    assert pickle.loads(pickle.dumps(COSTS)) == COSTS
