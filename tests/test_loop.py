"""One thread owns the engine; every other thread's request is answered, whatever happens."""

import dataclasses
import os
import select
import signal
import threading
import weakref
from collections import namedtuple
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from blendrag.errors import EngineClosedError
from blendrag.runtime.engine.loop import EngineLoop

PATIENCE = 10
"""Seconds after which a thread that should have been answered counts as forgotten."""


Sample = namedtuple("Sample", "index text")


@dataclass
class Output:
    request_id: str
    number: int
    finished: bool
    outputs: list[Sample] = field(default_factory=list)


class Engine:
    """Answers each request with as many outputs as its prompt says, one a step; records which thread does what.

    It steps only as often as `steps` was released, unless it runs `freely`.
    """

    def __init__(self, freely=True):
        self.thread = threading.current_thread()
        self.log: list = []
        self.open: dict[str, list[int]] = {}
        self.most_at_once = 0
        self.shut_down_by = None
        self.freely = freely
        self.steps = threading.Semaphore(0)
        self.stepping = threading.Event()
        self.fail_with: BaseException | None = None
        self.engine_core = SimpleNamespace(shutdown=self._shutdown)

    def add_request(self, request_id, prompt, params, **options):
        assert threading.current_thread() is self.thread
        if isinstance(prompt, Exception):
            raise prompt
        self.log.append((prompt, params, options))
        self.open[request_id] = [0, prompt]

    def has_unfinished_requests(self):
        assert threading.current_thread() is self.thread
        return bool(self.open)

    def step(self):
        assert threading.current_thread() is self.thread
        if not self.freely:
            self.stepping.set()
            assert self.steps.acquire(timeout=PATIENCE)
        if self.fail_with is not None:
            raise self.fail_with
        self.most_at_once = max(self.most_at_once, len(self.open))
        outputs = []
        for request_id, state in list(self.open.items()):
            state[0] += 1
            done = state[0] >= state[1]
            outputs.append(Output(request_id, state[0], done, [Sample(-state[0] % 2, f"step {state[0]}")]))
            if done:
                del self.open[request_id]
        return outputs

    def abort_request(self, request_ids):
        assert threading.current_thread() is self.thread
        self.log.append(("abort", *request_ids))
        for request_id in request_ids:
            self.open.pop(request_id, None)

    def _shutdown(self):
        self.shut_down_by = threading.current_thread()


@pytest.fixture(autouse=True)
def _no_model_to_free(monkeypatch):
    """Freeing a model's memory takes a second, and here is none."""
    monkeypatch.setattr("blendrag.runtime.engine.loop.free_memory", lambda: None)


@pytest.fixture
def start():
    """Starts a loop around an `Engine`; returns both."""
    loops = []

    def run(**options):
        made: list[Engine] = []

        def make():
            made.append(Engine(**options))
            return made[0]

        loop = EngineLoop(make, Engine.has_unfinished_requests)
        loops.append((loop, made))
        loop.start()
        return loop, made[0]

    yield run
    for loop, made in loops:
        for engine in made:
            engine.freely = True
            engine.steps.release(1000)
        answer(loop.close)


def in_thread(function, *args) -> Future:
    """Runs the function on a thread that cannot keep a failing test from ending."""
    future: Future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def reading(ticket) -> Future:
    """The numbers of the outputs that are still to come, read on another thread."""
    return in_thread(lambda: [output.number for output in ticket])


def answer(function, *args):
    return in_thread(function, *args).result(PATIENCE)


def numbers(ticket) -> list[int]:
    return reading(ticket).result(PATIENCE)


def within_a_step(engine):
    """Waits until the engine is in the middle of a step, where it stays until another is released."""
    assert engine.stepping.wait(PATIENCE)


# Requests.


def test_a_request_gets_its_outputs_in_order(start):
    loop, _ = start()
    assert numbers(loop.submit(5, None)) == [1, 2, 3, 4, 5]


def test_requests_are_added_in_the_order_they_were_handed_in_with_their_options(start):
    loop, engine = start()
    tickets = [loop.submit(1, n, lora_request=-n) for n in range(20)]
    assert [numbers(ticket) for ticket in tickets] == [[1]] * 20
    assert engine.log == [(1, n, {"lora_request": -n}) for n in range(20)]
    assert len({ticket.request_id for ticket in tickets}) == 20


def test_the_engine_is_made_and_used_by_one_thread(start):
    loop, engine = start()
    assert engine.thread is not threading.current_thread()
    assert answer(loop.call, lambda _: threading.current_thread()) is engine.thread


def test_requests_of_many_threads_share_batches_and_keep_apart(start):
    loop, engine = start(freely=False)
    with ThreadPoolExecutor(8) as pool:
        tickets = list(pool.map(lambda n: loop.submit(n, None), range(1, 33)))
        loop_answers = pool.map(numbers, tickets)
        engine.steps.release(1000)
        assert list(loop_answers) == [list(range(1, n + 1)) for n in range(1, 33)]
    assert engine.most_at_once > 1


def test_a_request_can_be_iterated_piece_by_piece_and_ends_once(start):
    loop, _ = start()
    ticket = loop.submit(3, None)
    assert answer(next, iter(ticket)).number == 1
    assert numbers(ticket) == [2, 3]
    assert numbers(ticket) == []


def test_each_output_holds_what_is_known_of_every_sample(start):
    loop, _ = start()
    ticket = loop.submit(3, None)
    samples = answer(lambda: [output.outputs for output in ticket])
    assert samples == [[Sample(1, "step 1")], [Sample(0, "step 2"), Sample(1, "step 1")],
                       [Sample(0, "step 2"), Sample(1, "step 3")]]


def test_an_output_that_cannot_be_delivered_leaves_nobody_waiting(start):
    loop, engine = start()
    step = engine.step
    engine.step = lambda: [dataclasses.replace(output, outputs=None) for output in step()]
    with pytest.raises(EngineClosedError):
        numbers(loop.submit(1, None))


def test_the_time_to_the_first_token_is_taken_once(start):
    loop, _ = start()
    ticket = loop.submit(3, None)
    answer(next, iter(ticket))
    taken = ticket.progress.first_token_s
    assert taken > 0
    assert numbers(ticket) == [2, 3]
    assert ticket.progress.first_token_s == taken


def test_a_start_that_fails_raises_when_its_thread_is_done():
    """At the interpreter's end a thread that is still freeing memory aborts the process."""

    def fail():
        raise ValueError("no model")

    loop = EngineLoop(fail, lambda engine: False)
    with pytest.raises(ValueError, match="no model"):
        loop.start()
    assert not loop._thread.is_alive()
    assert loop.closed


def test_a_request_the_engine_refuses_raises_in_its_own_thread_only(start):
    loop, _ = start()
    bad, good = loop.submit(ValueError("too long"), None), loop.submit(2, None)
    with pytest.raises(ValueError, match="too long"):
        numbers(bad)
    assert numbers(good) == [1, 2]
    assert numbers(bad) == []


# Abort.


def test_an_aborted_request_stops_in_the_engine_and_others_go_on(start):
    loop, engine = start(freely=False)
    long, other = loop.submit(1000, None), loop.submit(2, None)
    engine.steps.release(1)
    assert answer(next, iter(long)).number == 1
    long.abort()
    engine.steps.release(10)
    assert numbers(other) == [1, 2]
    assert answer(loop.call, lambda e: list(e.open)) == []
    assert ("abort", long.request_id) in engine.log
    assert numbers(long) == []


def test_aborting_what_has_ended_does_nothing(start):
    loop, engine = start()
    ticket = loop.submit(1, None)
    numbers(ticket)
    ticket.abort()
    ticket.abort()
    unread = loop.submit(1, None)
    numbers(loop.submit(5, None))
    unread.abort()
    answer(loop.call, lambda _: None)
    assert [entry for entry in engine.log if entry[0] == "abort"] == []


def test_whoever_waits_on_a_request_that_another_thread_aborts_is_let_go(start):
    loop, engine = start(freely=False)
    ticket = loop.submit(1000, None)
    engine.steps.release(1)
    assert answer(next, iter(ticket)).number == 1
    about_to_wait = threading.Event()

    def read():
        about_to_wait.set()
        return [output.number for output in ticket]

    waiting = in_thread(read)
    assert about_to_wait.wait(PATIENCE)
    ticket.abort()
    assert waiting.result(PATIENCE) == []


# Calls.


def test_a_call_returns_what_it_returns_and_raises_what_it_raises(start):
    loop, engine = start()
    assert answer(loop.call, lambda e: e) is engine
    with pytest.raises(KeyError, match="nothing"):
        answer(loop.call, lambda _: {}["nothing"])
    with pytest.raises(SystemExit):
        answer(loop.call, lambda _: exit())
    assert numbers(loop.submit(2, None)) == [1, 2]


def test_calls_run_between_steps_of_running_requests(start):
    loop, engine = start(freely=False)
    ticket = loop.submit(3, None)
    within_a_step(engine)
    called = in_thread(loop.call, lambda e: dict(e.open))
    engine.steps.release(1)
    assert called.result(PATIENCE) == {ticket.request_id: [1, 3]}
    engine.steps.release(10)
    assert numbers(ticket) == [1, 2, 3]


# Start.


def test_an_engine_that_cannot_be_made_says_so_at_the_start_and_refuses_the_rest():
    def fail():
        raise RuntimeError("no such model")

    loop = EngineLoop(fail, Engine.has_unfinished_requests)
    with pytest.raises(RuntimeError, match="no such model"):
        loop.start()
    with pytest.raises(EngineClosedError):
        loop.submit(1, None)
    answer(loop.close)


def test_a_loop_that_was_never_started_can_be_closed():
    EngineLoop(Engine, Engine.has_unfinished_requests).close()


# Death.


def dying(loop, engine):
    """A request in a step of which the engine dies."""
    ticket = loop.submit(1000, None)
    engine.fail_with = RuntimeError("CUDA out of memory")
    engine.steps.release(1)
    return ticket


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), SystemExit(1), MemoryError()], ids=repr)
def test_when_the_engine_dies_every_request_learns_why(start, error):
    loop, engine = start(freely=False)
    tickets = [loop.submit(1000, None) for _ in range(3)]
    within_a_step(engine)
    engine.fail_with = error
    waiting = [reading(ticket) for ticket in tickets]
    late = in_thread(loop.call, lambda e: e.open)
    engine.steps.release(1)
    for future in [*waiting, late]:
        with pytest.raises(EngineClosedError, match=type(error).__name__):
            future.result(PATIENCE)


def test_a_dead_engine_is_shut_down_and_every_later_command_says_why_it_died(start):
    loop, engine = start(freely=False)
    with pytest.raises(EngineClosedError):
        numbers(dying(loop, engine))
    answer(loop.close)
    assert engine.shut_down_by is engine.thread
    for command in (lambda: loop.submit(1, None), lambda: answer(loop.call, lambda e: e)):
        with pytest.raises(EngineClosedError, match="CUDA out of memory"):
            command()


def test_aborting_after_the_engines_death_hides_nothing(start):
    loop, engine = start(freely=False)
    other = loop.submit(1000, None)
    with pytest.raises(EngineClosedError, match="CUDA out of memory"):
        numbers(dying(loop, engine))
    answer(loop.close)
    other.abort()  # as `generate` does for the other prompts of its batch


# Close.


def test_closing_ends_requests_that_wait_and_shuts_the_engine_down(start):
    loop, engine = start(freely=False)
    tickets = [loop.submit(1000, None) for _ in range(3)]
    within_a_step(engine)
    waiting = [reading(ticket) for ticket in tickets]
    closing = in_thread(loop.close)
    engine.steps.release(1000)
    closing.result(PATIENCE)
    for future in waiting:
        with pytest.raises(EngineClosedError, match="closed before the request finished"):
            future.result(PATIENCE)
    assert engine.shut_down_by is engine.thread


def test_what_was_handed_in_before_the_end_is_answered_not_forgotten(start):
    loop, engine = start(freely=False)
    loop.submit(1000, None)
    within_a_step(engine)
    answers = [in_thread(loop.call, lambda e: e.open) for _ in range(20)] + [
        in_thread(lambda: numbers(loop.submit(1000, None))) for _ in range(20)]
    closing = in_thread(loop.close)
    engine.steps.release(1000)
    closing.result(PATIENCE)
    for answer in answers:
        error = answer.exception(PATIENCE)
        assert error is None or isinstance(error, EngineClosedError)


def test_a_closed_loop_refuses_commands_and_can_be_closed_again(start):
    loop, _ = start()
    answer(loop.close)
    answer(loop.close)
    with pytest.raises(EngineClosedError, match="make a new BlendEngine"):
        loop.submit(1, None)
    with pytest.raises(EngineClosedError, match="make a new BlendEngine"):
        answer(loop.call, lambda e: e)


def test_aborting_after_the_close_is_silent(start):
    loop, _ = start()
    ticket = loop.submit(10**9, None)
    answer(next, iter(ticket))
    answer(loop.close)
    ticket.abort()  # as closing a stream does that nobody read to its end


def test_the_owner_thread_and_many_others_may_close_at_once(start):
    loop, engine = start()
    answer(loop.call, lambda _: loop.close())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: answer(loop.close), range(8)))
    assert engine.shut_down_by is engine.thread


def test_an_engine_that_does_not_shut_down_cleanly_is_let_go_with_a_warning(start, caplog):
    loop, engine = start()

    def refuse():
        raise RuntimeError("will not")

    engine.engine_core.shutdown = refuse
    answer(loop.close)
    assert "did not shut down cleanly" in caplog.text


@pytest.mark.parametrize("dies", [False, True])
def test_a_closed_loop_keeps_nothing_of_its_engine(dies, monkeypatch):
    monkeypatch.undo()  # the memory is freed for once, but for vLLM's globals: those of the tests' engine, if it runs
    monkeypatch.setattr("vllm.distributed.parallel_state.cleanup_dist_env_and_memory", lambda: None)
    made = []

    def make():
        engine = Engine()
        engine.fail_with = RuntimeError("boom") if dies else None
        made.append(weakref.ref(engine))
        return engine

    loop = EngineLoop(make, Engine.has_unfinished_requests)
    loop.start()
    ticket = loop.submit(2, None)
    if dies:
        with pytest.raises(EngineClosedError, match="boom"):
            numbers(ticket)
    else:
        assert numbers(ticket) == [1, 2]
    answer(loop.close)
    assert made[0]() is None


def test_rest_returns_when_the_engine_has_nothing_to_do(start):
    loop, engine = start(freely=False)
    ticket = loop.submit(2, None)
    resting = in_thread(loop.rest)
    engine.steps.release()
    assert not resting.done()
    engine.steps.release()
    resting.result(PATIENCE)
    assert [output.number for output in ticket] == [1, 2]
    answer(loop.rest)


def test_rest_ends_with_the_engine(start):
    loop, engine = start(freely=False)
    loop.submit(2, None)
    resting = in_thread(loop.rest)
    assert engine.stepping.wait(PATIENCE)
    in_thread(loop.close)
    engine.steps.release(10)
    with pytest.raises(EngineClosedError):
        resting.result(PATIENCE)


def child_of_a_running_engine(loop, ticket, report):
    """Every use in a fork says so at once, and its end leaves the parent's engine alone."""
    for use in (lambda: loop.submit(1, None), lambda: loop.call(id), loop.rest, lambda: list(ticket)):
        with pytest.raises(EngineClosedError, match="start engines after the fork"):
            use()
    assert loop.closed
    ticket.abort()
    loop.close()
    os.write(report, b"done")


@pytest.mark.parametrize("held", [False, True])
def test_a_fork_never_waits_for_the_thread_that_it_does_not_have(start, held):
    loop, engine = start(freely=False)
    ticket = answer(loop.submit, 2, None)
    if held:
        in_thread(loop._lock.acquire).result(PATIENCE)  # as another thread may be in the middle of a call
    reading_end, writing_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child_of_a_running_engine(loop, ticket, writing_end)
        finally:
            os._exit(0)
    os.close(writing_end)
    try:
        ready, _, _ = select.select([reading_end], [], [], PATIENCE)
        assert ready
        assert os.read(reading_end, 10) == b"done"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading_end)
        if held:
            loop._lock = threading.RLock()
    engine.steps.release(2)
    assert reading(ticket).result(PATIENCE) == [1, 2]
