"""When chunks that requests brought along are encoded, and how much of them in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.runtime.messages import BlendReports, EncodeReport, Missing
from blendrag.runtime.planning.populator import Populator
from blendrag.runtime.planning.step_load import StepLoad

DECODES, PREFILLS, IDLE = StepLoad(1, False), StepLoad(2000, True), StepLoad(0, False)

TOKENS_PER_SECOND = 4000
REQUEST: Any = SimpleNamespace(num_output_tokens=1, is_finished=lambda: False)


def chunk(length: int) -> Missing:
    return Missing(list(range(length)), False, "default")


def populator(*lengths: int, stored: frozenset[str] = frozenset(), **settings: int) -> Populator:
    """With chunks of so many tokens, each named by its length."""
    limits = {"max_tokens": 4000, "step_tokens": 512, "queue_tokens": 10_000} | settings
    queue = Populator(lambda missing: str(len(missing.ids)), lambda keys: set(keys) & stored, **limits)
    queue.add(REQUEST, [chunk(length) for length in lengths])
    return queue


class Worker:
    """Computes what it is asked for, so many tokens a second."""

    def __init__(self, queue: Populator) -> None:
        self.queue = queue
        self.rows: list[int] = []
        self.stored: list[int] = []
        self.done = 0

    def step(self, step: Any, rate: float = TOKENS_PER_SECOND) -> int:
        """The rows that a step computes."""
        chunks, budget = self.queue.take(step)
        self.rows += [len(missing.ids) for missing in chunks]
        self.stored += [len(missing.ids) for missing in chunks]
        if not budget:
            return 0
        rows = min(budget, sum(self.rows))
        left = rows
        while self.rows and left >= self.rows[0]:
            left -= self.rows.pop(0)
            self.done += 1
        if left:
            self.rows[0] -= left
        self.queue.done(EncodeReport(self.done, rows, rows / rate))
        return rows


def test_a_step_beside_a_request_takes_no_longer_than_a_tenth_of_a_second_however_long_the_chunk() -> None:
    worker = Worker(populator(3000, 100))
    rows = [worker.step(DECODES) for _ in range(12)]
    assert rows == [32, 400, 400, 400, 400, 400, 400, 400, 268, 0, 0, 0]
    assert worker.stored == [3000, 100]


def test_a_fast_machine_encodes_the_configured_number_of_tokens() -> None:
    worker = Worker(populator(3000))
    assert [worker.step(DECODES, rate=100_000) for _ in range(3)] == [32, 512, 512]


def test_an_idle_step_takes_more_and_is_bounded_for_the_sake_of_who_comes_next() -> None:
    worker = Worker(populator(3000))
    assert [worker.step(IDLE) for _ in range(5)] == [32, 1000, 1000, 968, 0]


def test_what_is_stored_meanwhile_is_not_encoded() -> None:
    worker = Worker(populator(200, 250, stored=frozenset({"200"})))
    assert [worker.step(IDLE), worker.step(IDLE)] == [32, 218]
    assert worker.stored == [250]
    assert not worker.queue.pending


def test_where_every_step_computes_prompts_chunks_have_a_turn_now_and_then() -> None:
    worker = Worker(populator(400))
    steps = [step for step in range(60) if worker.step(PREFILLS)]
    assert steps == [16, 33]


def test_a_chunk_that_the_model_has_no_positions_for_is_not_encoded() -> None:
    assert not populator(4001).pending
    assert not populator(10_001, max_tokens=200_000).pending, "nor one that is longer than the queue"


def test_the_oldest_chunks_leave_a_full_queue_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    queue = populator(*range(1000, 1020))
    worker = Worker(queue)
    while queue.pending:
        worker.step(IDLE)
    assert worker.stored == list(range(1011, 1020))
    assert queue.dropped == 11
    assert "chunks that requests brought were computed, not stored" in caplog.text


def test_chunks_under_way_do_not_leave_the_queue() -> None:
    queue = populator(3000)
    worker = Worker(queue)
    worker.step(DECODES)
    queue.add(REQUEST, [chunk(length) for length in (3500, 3600)])
    while queue.pending:
        worker.step(IDLE)
    assert worker.stored == [3000, 3600]


def test_a_chunk_is_stored_when_its_last_rank_has_written_its_share() -> None:
    queue = populator(20, 30)
    queue.take(IDLE)
    for first, second, pending in ((1, 0, True), (2, 1, True), (2, 2, False)):
        reports = BlendReports(encoded=EncodeReport(first, 50, 1)).aggregate(
            BlendReports(encoded=EncodeReport(second, 50, 1)))
        queue.done(reports.encoded)
        assert queue.pending is pending
