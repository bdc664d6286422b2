"""When chunks that requests brought along are encoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from blendrag.runtime.messages import Missing
from blendrag.runtime.planning.populator import Populator

DECODES = SimpleNamespace(num_scheduled_tokens={"a": 1}, scheduled_new_reqs=[], total_num_scheduled_tokens=1)
PREFILLS = SimpleNamespace(num_scheduled_tokens={"a": 2000}, scheduled_new_reqs=[None], total_num_scheduled_tokens=2000)
IDLE = SimpleNamespace(num_scheduled_tokens={}, scheduled_new_reqs=[], total_num_scheduled_tokens=0)


def populator(*lengths: int, stored: frozenset[str] = frozenset()) -> Populator:
    """With chunks of so many tokens, each named by its length."""
    queue = Populator(lambda missing: str(len(missing.ids)), lambda keys: set(keys) & stored)
    request: Any = SimpleNamespace(num_output_tokens=1, is_finished=lambda: False)
    queue.add(request, [Missing(list(range(length)), is_prefix=False) for length in lengths])
    return queue


def taken(queue: Populator, step: Any) -> list[int]:
    found = [len(missing.ids) for missing in queue.take(step)]
    queue.done()
    return found


def test_a_step_that_decodes_takes_few_and_an_idle_one_many() -> None:
    assert taken(populator(200, 250, 300), DECODES) == [200, 250]
    assert taken(populator(600, 250), DECODES) == [600], "one at least, however long"
    assert taken(populator(200, 250, 300), IDLE) == [200, 250, 300]
    assert taken(populator(200, 250, stored=frozenset({"200"})), DECODES) == [250]


def test_where_every_step_computes_prompts_chunks_have_a_turn_now_and_then() -> None:
    queue = populator(400, 300, 200)
    when = {step: found for step in range(60) if (found := taken(queue, PREFILLS))}
    assert list(when.values()) == [[400], [300, 200]]
    first, second = when
    assert second - first > 10
