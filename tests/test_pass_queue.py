"""Passes of requests run first come, first served, forward by forward."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendrag.runtime.messages import BlendReport
from blendrag.runtime.passes.forward import Part
from blendrag.runtime.passes.pass_queue import PassQueue


class Blender:
    """Its jobs are named after what they need: "A 30 20" is a request's two forwards, of 30 and 20 rows.

    Attributes:
        ran: the forwards, each as the names and rows of the requests in it.
        begun, closed: jobs.
        fail: the next forward that holds one of these names fails.
        reading: jobs whose entries are not in memory.
        waits: of each look at them, whether it may take a while.
        released: jobs that need no entries any more.
    """

    def __init__(self) -> None:
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.forward = self.entries = self
        self.ran: list[str] = []
        self.begun: list[str] = []
        self.closed: list[str] = []
        self.fail = ""
        self.reading = ""
        self.waits: list[bool] = []
        self.released: list[str] = []

    def needs(self, job: Any) -> dict[str, int]:
        return {}

    def ready(self, requests: Mapping[str, Any], wait_s: float) -> list[bool]:
        self.waits.append(wait_s > 0)
        return [request[0] not in self.reading for request in requests]

    def release(self, request_id: str) -> None:
        self.released.append(request_id[0])

    def passes(self, job: Any) -> Generator[Any, float, BlendReport]:
        name, *forwards = job.request_id.split()
        self.begun.append(name)
        report = BlendReport()
        try:
            for rows in forwards:
                lane = SimpleNamespace(name=name, context_tokens=0)
                report.blend_s += yield [(lane, Part(slice(0, int(rows)), last=True))]
        except RuntimeError as error:
            report.failure = str(error)
        except GeneratorExit:
            self.closed.append(name)
            raise
        return report

    def timed_tile(self, tile: Any) -> float:
        self.ran.append("+".join(f"{lane.name}{part.rows.stop}" for lane, part in tile))
        if any(lane.name in self.fail for lane, _ in tile):
            raise RuntimeError("a kernel failed")
        return 1.0


@pytest.fixture
def blender() -> Blender:
    return Blender()


def queue_of(blender: Any, *jobs: str, shared_rows: int = 0) -> PassQueue:
    queue = PassQueue(blender, shared_rows)
    queue.add([SimpleNamespace(request_id=job) for job in jobs])  # type: ignore[misc]
    return queue


def ended(reports: dict[str, BlendReport]) -> str:
    return " ".join(name.split()[0] for name in reports)


def test_a_step_computes_no_more_than_its_rows(blender: Blender) -> None:
    queue = queue_of(blender, "A 30 20", "B 10 10")
    assert ended(queue.advance(60)) == "A"
    assert blender.ran == ["A30", "A20", "B10"]
    assert ended(queue.advance(60)) == "B"


def test_what_comes_first_is_done_first(blender: Blender) -> None:
    queue = queue_of(blender, "A 30 30 30", "B 1")
    assert [ended(queue.advance(30)) for _ in range(4)] == ["", "", "A", "B"]
    assert blender.begun == ["A", "B"], "what waits has loaded nothing"


def test_a_forward_larger_than_a_step_runs_on_its_own(blender: Blender) -> None:
    queue = queue_of(blender, "A 500", "B 10")
    assert [ended(queue.advance(100)), ended(queue.advance(100))] == ["A", "B"]


def test_a_step_without_rows_computes_nothing(blender: Blender) -> None:
    assert queue_of(blender, "A 10").advance(0) == {}
    assert blender.ran == []


def test_reading_a_long_context_counts(blender: Blender) -> None:
    queue = queue_of(blender, "A 10", "B 10")
    long = [(SimpleNamespace(name="A", context_tokens=8000), Part(slice(0, 10), last=True))]
    blender.passes = lambda job: iter_once(long)  # type: ignore[method-assign]
    assert len(queue.advance(1000)) == 1


def iter_once(tile: Any) -> Generator[Any, float, BlendReport]:
    yield tile
    return BlendReport()


def test_small_forwards_of_several_requests_are_one_where_that_pays(blender: Blender) -> None:
    queue = queue_of(blender, "A 30 200", "B 30 40", "C 30", shared_rows=100)
    assert ended(queue.advance(10_000)) == "C A B"
    assert blender.ran == ["A30+B30+C30", "A200", "B40"]


def test_a_failure_is_its_own_requests(blender: Blender) -> None:
    queue, blender.fail = queue_of(blender, "A 30", "B 30"), "A"
    reports = queue.advance(1000)
    assert [reports[name].failure for name in ("A 30", "B 30")] == ["a kernel failed", ""]


def test_requests_that_fail_together_are_tried_one_by_one(blender: Blender) -> None:
    queue, blender.fail = queue_of(blender, "A 30", "B 30", shared_rows=100), "B"
    reports = queue.advance(1000)
    assert [reports[name].failure for name in ("A 30", "B 30")] == ["", "a kernel failed"]
    assert blender.ran == ["A30+B30", "A30", "B30"]


def test_an_aborted_request_leaves_the_queue_wherever_it_is(blender: Blender) -> None:
    queue = queue_of(blender, "A 30 30", "B 30", "C 30")
    queue.advance(30)
    assert queue.drop({"A 30 30", "C 30", "another"}) == {"A 30 30", "C 30"}
    assert blender.closed == ["A"]
    assert ended(queue.advance(1000)) == "B"


def test_after_a_change_of_weights_what_is_under_way_begins_anew(blender: Blender) -> None:
    queue = queue_of(blender, "A 30 20")
    queue.advance(30)
    queue.restart()
    assert ended(queue.advance(1000)) == "A"
    assert blender.ran == ["A30", "A30", "A20"]


def test_a_job_without_a_forward_ends_at_once(blender: Blender) -> None:
    assert ended(queue_of(blender, "A", "B 10").advance(100)) == "A B"


def test_jobs_whose_entries_are_read_let_others_pass_and_keep_their_place(blender: Blender) -> None:
    queue, blender.reading = queue_of(blender, "A 30", "B 30", "C 30 30"), "AC"
    assert ended(queue.advance(1000, idle=True)) == "B"
    blender.reading = "C"
    assert ended(queue.advance(1000)) == "A"
    blender.reading = ""
    assert ended(queue.advance(30)) == ""
    queue.add([SimpleNamespace(request_id="D 30")])  # type: ignore[list-item]
    assert ended(queue.advance(1000)) == "C D"
    assert blender.begun == blender.released == ["B", "A", "C", "D"]


def test_a_step_waits_for_reads_only_where_there_is_nothing_else_to_do(blender: Blender) -> None:
    queue, blender.reading = queue_of(blender, "A 30 30", "B 30"), "B"
    queue.advance(30, idle=True)
    queue.advance(30, idle=True)
    queue.advance(30, idle=False)
    queue.advance(30, idle=True)
    blender.reading = ""
    assert ended(queue.advance(30, idle=True)) == "B"
    queue.advance(30, idle=True)
    assert blender.waits == [True, False, False, True, True], "nobody looks when nobody waits"


def test_what_an_aborted_request_would_have_read_is_let_go(blender: Blender) -> None:
    queue, blender.reading = queue_of(blender, "A 30"), "A"
    queue.advance(30)
    assert queue.drop({"A 30"}) == {"A 30"}
    assert (blender.released, queue.advance(30)) == (["A"], {})
