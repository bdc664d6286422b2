"""The rows of the table: each feature, and the probe that finds out whether a class has it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from pydantic import BaseModel

from tests.comparison.subject import NotApplicable, Subject
from tests.engine.texts import PASSAGES

COUNTING = "One, two, three, four, five, six,"
PROMPTS = [COUNTING, "The capital of France is", "Red, green,", "Monday, Tuesday,"]
LONG = 400
"""Tokens of an answer that is meant to be left."""


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        name: as the page calls it.
        probe: whether a class has it; an exception is a no, `NotApplicable` neither.
        alone: needs an engine of its own; the suite has other tests of that.
    """

    name: str
    probe: Callable[[Subject], bool | Awaitable[bool]]
    alone: bool = False


FEATURES: dict[str, Feature] = {}


def feature(name: str, *, alone: bool = False) -> Callable[[Any], Any]:
    """Makes a row of a probe."""
    def add(probe: Any) -> Any:
        FEATURES[probe.__name__] = Feature(name, probe, alone)
        return probe
    return add


_loop = asyncio.new_event_loop()
"""One for all probes: clients of servers keep connections that belong to the loop they were opened in."""


def run(feature: Feature, subject: Subject) -> bool | None:
    """The result of a probe; None where it does not apply.

    Raises:
        Exception: whatever the class raises.
    """
    try:
        found = feature.probe(subject)
        return bool(_loop.run_until_complete(found) if asyncio.iscoroutine(found) else found)
    except NotApplicable:
        return None


# Answers.


@feature("Answers with vLLM (transformers) of today")
def answers(subject: Subject) -> bool:
    return bool(subject.ask(COUNTING, max_tokens=4).text)


@feature("Chat messages go through the model's chat template")
def chat_template(subject: Subject) -> bool:
    """The prompt is as long as the template makes it; a BOS too many is another row's matter."""
    ids = _templated(subject, system="Be brief.", user="Hello.")
    subject.watch.update()
    subject.converse("Be brief.", "Hello.", max_tokens=1)
    subject.watch.update()
    return subject.watch.prompt - len(ids) in (0, 1)


@feature("No second BOS in front of a templated prompt", alone=True)
def one_bos(subject: Subject) -> bool:
    """The model's tokenizer puts a BOS before any text, and the chat template has one too."""
    ids = _templated(subject, system="Be brief.", user="Hello.")
    assert subject.column.tokenizer("Hello.").input_ids[0] == ids[0] == subject.column.tokenizer.bos_token_id
    subject.watch.update()
    subject.converse("Be brief.", "Hello.", max_tokens=1)
    subject.watch.update()
    return subject.watch.prompt == len(ids)


@feature("`stop` of the constructor still counts when a call has its own")
def merged_stops(subject: Subject) -> bool:
    answer = subject.ask(COUNTING, max_tokens=8, ignore_eos=True).text
    stopping = answer[len(answer) // 2:][:3]
    stopped = subject.variant(stop=[stopping]).ask(COUNTING, max_tokens=8, ignore_eos=True, stop=["@@"]).text
    return stopping in answer and len(stopped) < len(answer)


@feature("Several samples (`n`)")
def samples(subject: Subject) -> bool:
    return len(subject.variant(temperature=1.0).ask(COUNTING, max_tokens=3, n=2).texts) == 2


@feature("Why the answer ended")
def finish_reason(subject: Subject) -> bool:
    return subject.ask(COUNTING, max_tokens=3, ignore_eos=True).finish == "length"


@feature("Which stop sequence ended it")
def stop_reason(subject: Subject) -> bool:
    answer = subject.ask(COUNTING, max_tokens=8, ignore_eos=True).text
    stopping = answer[len(answer) // 2:][:3]
    return subject.ask(COUNTING, max_tokens=8, ignore_eos=True, stop=[stopping]).stop == stopping


@feature("Log probabilities of the answer's tokens")
def logprobs(subject: Subject) -> bool:
    return subject.ask(COUNTING, max_tokens=3, ignore_eos=True, logprobs=True).logprobs == 3


# Streams.


@feature("Streams token by token")
def stream(subject: Subject) -> bool:
    return _several(subject.stream(COUNTING, max_tokens=8, ignore_eos=True))


@feature("Leaving a stream stops the engine's work")
def leave_stream(subject: Subject) -> bool:
    before = subject.watch.worked()
    pieces = subject.stream(COUNTING, leave_after=3, max_tokens=LONG, ignore_eos=True)
    return len(pieces) == 3 and _ended_early(subject, before)


@feature("Async streams token by token; the event loop stays free")
async def astream(subject: Subject) -> bool:
    async with _loop_is_free() as turns:
        pieces = await subject.astream(COUNTING, max_tokens=8, ignore_eos=True)
    return _several(pieces) and len(turns) > 3 * len(pieces)


@feature("Leaving an async stream stops the engine's work")
async def leave_astream(subject: Subject) -> bool:
    before = subject.watch.worked()
    pieces = await subject.astream(COUNTING, leave_after=3, max_tokens=LONG, ignore_eos=True)
    return len(pieces) == 3 and await asyncio.to_thread(_ended_early, subject, before)


# At once.


@feature("Awaited calls leave the event loop free")
async def aask(subject: Subject) -> bool:
    async with _loop_is_free() as turns:
        answer = await subject.aask(COUNTING, max_tokens=8, ignore_eos=True)
    return bool(answer.text) and len(turns) > 10


@feature("Cancelling an awaited call stops the engine's work")
async def cancel(subject: Subject) -> bool:
    before = subject.watch.worked()
    task = asyncio.ensure_future(subject.aask(COUNTING, max_tokens=LONG, ignore_eos=True))
    begun = asyncio.create_task(asyncio.to_thread(subject.watch.wait, lambda running: running > 0 or task.done()))
    await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task  # it raised, or was over before the loop could turn
        return False
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return await asyncio.to_thread(_ended_early, subject, before)


@feature("A batch is computed together")
def batch(subject: Subject) -> bool:
    with subject.watch.together() as seen:
        subject.batch(PROMPTS, max_tokens=24, ignore_eos=True)
    return max(seen) > 1


@feature("Many awaited calls at once")
async def gathered(subject: Subject) -> bool:
    alone = [(await subject.aask(prompt, max_tokens=3)).text for prompt in PROMPTS]
    answers = await asyncio.gather(*(subject.aask(prompt, max_tokens=3) for prompt in PROMPTS * 2))
    return [answer.text for answer in answers] == alone * 2


@feature("Many threads at once")
def threads(subject: Subject) -> bool:
    def text(prompt: str) -> str:
        return subject.ask(prompt, max_tokens=3).text

    alone = list(map(text, PROMPTS))
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(text, PROMPTS * 2)) == alone * 2


# Tools and structure.


@feature("Tool calls")
def tools(subject: Subject) -> bool:
    """Tools are shown to the model, and a call in its syntax is read.  What it says is held to such a call."""
    said = '<tool_call>\n{"name": "now", "arguments": {"local": true}}\n</tool_call>'
    subject.watch.update()
    subject.ask("What time is it?", max_tokens=1)
    subject.watch.update()
    plain = subject.watch.prompt
    answer = subject.call_tools("What time is it?", "auto", choice=[said], max_tokens=60)
    subject.watch.update()
    return subject.watch.prompt > plain + 20 and answer.calls == [("now", {"local": True})]


@feature("A tool call can be forced, with any model")
def forced_tools(subject: Subject) -> bool:
    answer = subject.call_tools("What time is it?", "now", max_tokens=60)
    return [name for name, _ in answer.calls] == ["now"]


class Verdict(BaseModel):
    """A short form for an answer."""

    ok: bool


@feature("Structured output, guaranteed with any model")
def structured(subject: Subject) -> bool:
    return isinstance(subject.structured(Verdict, "Is Paris in France?"), Verdict)


# Accounts.


@feature("Token usage")
def usage(subject: Subject) -> bool:
    subject.watch.update()
    answer = subject.ask(COUNTING, max_tokens=3, ignore_eos=True)
    subject.watch.update()
    return answer.usage == (subject.watch.prompt, 3)


@feature("Token usage at the end of a stream")
def stream_usage(subject: Subject) -> bool:
    subject.watch.update()
    pieces = subject.stream(COUNTING, max_tokens=3, ignore_eos=True, **subject.column.stream_usage)
    subject.watch.update()
    return [piece.usage for piece in pieces if piece.usage] == [(subject.watch.prompt, 3)]


@feature("How many prompt tokens were not computed")
def cached_tokens(subject: Subject) -> bool:
    subject.column.store(PASSAGES[:3])
    orders = [PASSAGES[:3], PASSAGES[:3], PASSAGES[2::-1]]
    answers = [subject.ask("\n\n".join([_first(subject), *passages, "Why?"]), max_tokens=1) for passages in orders]
    return any((answer.cached or 0) > 0 for answer in answers)


@feature("Chunks are reused in any order")
def any_order(subject: Subject) -> bool:
    """Of known passages in an order that is new, most is not computed again."""
    passages = PASSAGES[3:6]
    subject.column.store(passages)
    subject.ask("\n\n".join([_first(subject), *passages, "What is it about?"]), max_tokens=1)
    subject.watch.update()
    again = [_first(subject), passages[2], passages[0], passages[1], "What is missing?"]
    subject.ask("\n\n".join(again), max_tokens=1)
    subject.watch.update()
    return subject.watch.cached > subject.watch.prompt / 2


@feature("The context window that the framework is told is the engine's")
def context_window(subject: Subject) -> bool:
    return subject.context_window() == 2048


@feature("Counts tokens with the model's tokenizer, offline")
def token_count(subject: Subject) -> bool:
    text = "Toggenburg goats ripen for three weeks."
    return subject.count_tokens(text) == len(subject.column.tokenizer(text, add_special_tokens=False).input_ids)


# The object.


@feature("The framework's response cache tells models and settings apart")
def cache_identity(subject: Subject) -> bool:
    if not subject.has_response_cache():
        raise NotApplicable
    cache = _CountingCache()
    set_llm_cache(cache)
    try:
        for model in (subject, subject):
            model.ask(COUNTING, max_tokens=2)
        same = cache.hits
        for model in (subject.variant(temperature=0.5), subject.variant(model="other")):
            with suppress(Exception):  # a server has no model of that name, which is told apart as well
                model.ask(COUNTING, max_tokens=2)
    finally:
        set_llm_cache(None)
    return same == cache.hits == 1


@feature("Serialises and loads again")
def serialisation(subject: Subject) -> bool:
    back = subject.reloaded()
    return type(back) is type(subject.model) and subject.settings(back) == subject.settings(subject.model)


@feature("Construction starts nothing")
def lazy(subject: Subject) -> bool:
    """A model that does not exist is none of the constructor's business."""
    subject.column.nowhere()
    return True


@feature("An unknown argument of the constructor is an error")
def unknown_field(subject: Subject) -> bool:
    return _complains(lambda: type(subject)(subject.column, subject.column.make(frobnicate=1)).ask(COUNTING))


@feature("An unknown argument of a call is an error")
def unknown_argument(subject: Subject) -> bool:
    return _complains(lambda: subject.ask(COUNTING, max_tokens=1, frobnicate=1))


@feature("Typed (`py.typed`)")
def typed(subject: Subject) -> bool:
    file = Path(str(sys.modules[subject.column.kind.__module__].__file__))
    packages = subject.column.kind.__module__.count(".") + 1
    return any((folder / "py.typed").exists() for folder in file.parents[:packages])


@feature("`close()` frees the engine", alone=True)
def close(subject: Subject) -> bool:
    if not subject.column.has_engine:
        raise NotApplicable
    subject.model.close()
    released = subject.watch.release()  # type: ignore[attr-defined]  # of engines in this process
    gc.collect()
    return released() is None


def _first(subject: Subject) -> str:
    """How prompts begin that no other class asked before on the same engine."""
    return f"Passages for {subject.column.kind.__module__}.{subject.column.kind.__name__}:"


def _templated(subject: Subject, system: str, user: str) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text = subject.column.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(subject.column.tokenizer(text, add_special_tokens=False).input_ids)


def _several(pieces: list[Any]) -> bool:
    return sum(bool(piece.text) for piece in pieces) >= 3


def _ended_early(subject: Subject, before: int) -> bool:
    """Whether the engine is idle before an answer of `LONG` tokens could be done."""
    try:
        subject.watch.wait(lambda running: running == 0)
    except TimeoutError:
        return False
    return subject.watch.worked() - before < LONG - 20


def _complains(act: Callable[[], Any]) -> bool:
    try:
        act()
    except Exception as error:
        if "frobnicate" not in str(error):
            raise
        return True
    return False


@asynccontextmanager
async def _loop_is_free() -> AsyncIterator[list[None]]:
    """A list that grows with each turn of the event loop."""
    turns: list[None] = []

    async def turn() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0.001)  # more turns would keep the engine's thread from working

    task = asyncio.create_task(turn())
    yield turns
    task.cancel()


class _CountingCache(InMemoryCache):
    """Counts the answers that it gives."""

    hits = 0

    def lookup(self, prompt: str, llm_string: str) -> Any:
        found = super().lookup(prompt, llm_string)
        self.hits += found is not None
        return found
