"""What one client can take of others' time: bodies made to be expensive, against everything that reads them.

Each body is rewritten as the server does it, while an event loop ticks beside it, and then asked of a running engine in
which a neighbour decodes, with blending and, for comparison, without.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table

from blendrag.engine import BlendEngine
from blendrag.errors import RequestError
from blendrag.prompt import mark_chunks
from blendrag.serve.reader import DocumentReader
from blendrag.serve.rewriting import Rewriting

ALLOWED_S = 0.2
"""Of anybody else's time, beyond what the same prompt takes of it in plain vLLM."""

_PATH = "/v1/completions"


@dataclass(frozen=True)
class Abuse:
    """A body of /v1/completions that is made to be expensive."""

    name: str
    body: dict[str, Any]


@dataclass(frozen=True)
class AbuseFigure:
    """What a body took, in seconds.

    Attributes:
        refused: the server's answer to it, if it is refused.
        rewriting: in a thread of the server.
        event_loop: longest time that the server's event loop could not run meanwhile.
        scheduler: on the engine's thread, to plan the request.
        gap: longest time between two tokens of a neighbour.
        plain_gap: the same beside the same prompt without blending.
    """

    name: str
    refused: str
    rewriting: float
    event_loop: float
    scheduler: float
    gap: float
    plain_gap: float

    @property
    def passed(self) -> bool:
        """Whether others lose no more than `ALLOWED_S`."""
        return self.event_loop <= ALLOWED_S and self.scheduler <= ALLOWED_S and self.gap - self.plain_gap <= ALLOWED_S

    def times(self) -> tuple[float, ...]:
        """All times, in the order of the attributes."""
        return (self.rewriting, self.event_loop, self.scheduler, self.gap, self.plain_gap)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"passed": self.passed}


def abuses(size: int, prompt_words: int, attempt: int = 0) -> list[Abuse]:
    """Bodies of about `size` bytes, whose prompts have `prompt_words` words unless that is what is wrong with them.

    Each attempt has words of its own, so that nothing is in the store from the one before.
    """
    letter = "abcdefgh"[attempt]
    words = [f"{letter}{number % 997}" for number in range(prompt_words)]
    text, equal = " ".join(words), f"{letter} " * prompt_words
    pieces = [" ".join(words[start : start + 16]) for start in range(0, prompt_words, 16)]
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    return [
        Abuse("many tiny documents", _body(text, documents=[f"w{n}" for n in range(size // 8)])),
        Abuse("as many documents as are allowed", _body(text, documents=[f"{pieces[n % len(pieces)]} {n}"
                                                                        for n in range(1024)])),
        Abuse("one huge document", _body(text, documents=["word " * (size // 5)])),
        Abuse("a document longer than the model", _body(text, documents=[f"{text} {text} {text}"])),
        Abuse("equal tokens", _body(equal, documents=[f"{letter} " * (20 + n) for n in range(300)])),
        Abuse("one document many times", _body(text, documents=[pieces[0]] * (size // 100))),
        Abuse("documents within documents", _body(text, documents=[" ".join(words[n : n + 60]) for n in range(500)])),
        Abuse("thousands of spans", _body(text, blend={"spans": [[n, n + 1] for n in range(size // 16)]})),
        Abuse("as many spans as are allowed", _body(text, blend={"spans": [[n, n + 1] for n in range(1024)]})),
        Abuse("28 check layers", _body(text, blend={"spans": [[20, prompt_words // 2]], "policy": {
            "policy": "cacheblend", "ratio": 1.0, "check_layers": list(range(1, 29))}})),
        Abuse("one check layer, all rows", _body(text, blend={"spans": [[20, prompt_words // 2]], "policy": {
            "policy": "cacheblend", "ratio": 1.0, "check_layers": 1}})),
        Abuse("marks by the thousand", _body(mark_chunks(["w"] * (size // 40)))),
        Abuse("one long chunk that is not stored", _body(text, blend={"spans": [[8, prompt_words - 8]]})),
        Abuse("deep JSON", _body(text) | {"documents": [deep] * (size // 1000)}),
    ]


def measure(engine: BlendEngine, attempts: Sequence[Abuse]) -> AbuseFigure:
    """Tries one kind of body several times: the least of each time counts, as what else the machine does only adds.

    Args:
        engine: with `populate="on_miss"`, as a server has it.
    """
    figures = [_measure(engine, abuse) for abuse in attempts]
    return AbuseFigure(attempts[0].name, figures[0].refused,
                       *(min(times) for times in zip(*(figure.times() for figure in figures), strict=True)))


def _measure(engine: BlendEngine, abuse: Abuse) -> AbuseFigure:
    content = json.dumps(abuse.body).encode()
    rewriting = Rewriting(engine.config, lambda: DocumentReader(engine.tokens, engine.max_model_len))
    refused, seconds, stalled = asyncio.run(_rewrite(rewriting, content))
    body = abuse.body if refused else json.loads(rewriting(content, _PATH))
    # A server may run without the middleware: what it refuses is asked of the engine, too.
    params = body.get("kv_transfer_params") or {"blend": {"documents": body.get("documents", [])}}
    ids = engine.tokens.text_ids(body["prompt"])[: engine.max_model_len - 8]
    plain = _gap(engine, ids, {"blend": False}, lambda: None)
    with _planning(engine) as planned:
        gap = _gap(engine, ids, params, engine.flush)
    return AbuseFigure(abuse.name, refused, seconds, stalled, max(planned, default=0.0), gap, plain)


def table(figures: list[AbuseFigure]) -> Table:
    """The figures for a terminal."""
    result = Table(title="What one body takes of others' time, in seconds")
    for heading in ("body", "rewriting", "event loop", "scheduler", "longest gap", "plain vLLM", "passed", "refused"):
        result.add_column(heading, justify="left" if heading in ("body", "refused") else "right")
    for f in figures:
        result.add_row(f.name, *(f"{value:.2f}" for value in f.times()), "yes" if f.passed else "NO", f.refused[:60])
    return result


def _body(prompt: str, *, documents: list[str] | None = None, blend: dict[str, Any] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "served", "prompt": prompt, "max_tokens": 2}
    if documents is not None:
        body["documents"] = documents
    if blend is not None:
        body["kv_transfer_params"] = {"blend": blend}
    return body


async def _rewrite(rewriting: Rewriting, content: bytes) -> tuple[str, float, float]:
    """The refusal if there is one, seconds, and the longest time that this loop could not run."""
    loop = asyncio.get_running_loop()
    stalled = 0.0
    with ThreadPoolExecutor(1) as pool:
        started = time.perf_counter()
        running = loop.run_in_executor(pool, rewriting, content, _PATH)
        while not running.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            stalled = max(stalled, time.perf_counter() - before - 0.001)
        seconds = time.perf_counter() - started
        try:
            await running
        except RequestError as error:
            return str(error), seconds, stalled
    return "", seconds, stalled


@contextmanager
def _planning(engine: BlendEngine) -> Iterator[list[float]]:
    """Seconds that the scheduler side of the connector takes for each request that arrives meanwhile."""
    from blendrag.runtime.compat import scheduler_connector

    connector: Any = engine._start().call(scheduler_connector)
    plan, seconds = connector.on_new_request, []

    def timed(request: Any) -> None:
        started = time.perf_counter()
        plan(request)
        seconds.append(time.perf_counter() - started)

    connector.on_new_request = timed
    try:
        yield seconds
    finally:
        del connector.on_new_request


def _gap(engine: BlendEngine, ids: list[int], params: dict[str, Any], settle: Callable[[], None]) -> float:
    """Longest time between two tokens of a neighbour while a request is answered, and its chunks are stored."""
    from vllm import SamplingParams

    from blendrag.runtime.compat import token_prompt

    loop = engine._start()
    loop.call(lambda vllm: vllm.reset_prefix_cache())
    request = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True,
                             extra_args={"kv_transfer_params": params})
    decoding = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    times, decodes, ended = [], threading.Event(), threading.Event()

    def listen() -> None:
        for _ in engine.stream("Once upon a time", decoding, blend=False):  # leaving the loop ends the request
            times.append(time.perf_counter())
            decodes.set()
            if ended.is_set():
                break

    listener = threading.Thread(target=listen)
    listener.start()
    decodes.wait()
    # vLLM copies a request's parameters, and fails on those that are nested too deeply: that request's own error.
    with suppress(RecursionError):
        for _ in loop.submit(token_prompt(ids, None), request):
            pass
    for _ in range(50):  # chunks are encoded between the neighbour's tokens
        if not loop.call(_populates):
            break
        time.sleep(0.1)
    ended.set()
    listener.join()
    settle()
    return max((after - before for before, after in pairwise(times)), default=0.0)


def _populates(vllm: Any) -> bool:
    from blendrag.runtime.compat import scheduler_connector

    return bool(scheduler_connector(vllm).scheduler.populator.pending)
