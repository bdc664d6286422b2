"""What passes may compute in a step beside what vLLM computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.runtime.planning.step_load import PassBudget, StepLoad


def step(*tokens: int, new: bool = False) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict(enumerate(tokens)), scheduled_new_reqs=[None] if new else [],
                           total_num_scheduled_tokens=sum(tokens))


@pytest.mark.parametrize(("scheduled", "passes", "load"), [
    (step(), False, StepLoad(0, False)),
    (step(), True, StepLoad(0, True)),
    (step(1, 1), False, StepLoad(2, False)),
    (step(1, 1), True, StepLoad(2, True)),
    (step(1, 33), False, StepLoad(34, True)),
    (step(1, 5), False, StepLoad(6, False)),
    (step(1, 5, new=True), False, StepLoad(6, True)),
])
def test_prompts_are_told_from_decoding(scheduled: Any, passes: bool, load: StepLoad) -> None:
    assert StepLoad.of(scheduled, passes) == load


def test_a_step_with_a_pass_is_not_idle() -> None:
    assert [StepLoad(0, False).idle, StepLoad(0, True).idle, StepLoad(1, False).idle] == [True, False, False]


@pytest.mark.parametrize(("step_tokens", "tokens", "rows"), [
    (None, 0, 2048), (None, 16, 2032), (None, 1536, 512), (256, 0, 2048), (256, 16, 256), (4096, 16, 2032)])
def test_passes_have_what_vllm_leaves_of_a_batch(step_tokens: int | None, tokens: int, rows: int) -> None:
    assert PassBudget(2048, step_tokens).rows(StepLoad(tokens, True)) == rows


def test_where_vllm_prefills_in_every_step_passes_have_a_part_of_every_second_one() -> None:
    budget = PassBudget(2048, None)
    assert [budget.rows(StepLoad(2048, True)) for _ in range(4)] == [0, 512, 0, 512]
