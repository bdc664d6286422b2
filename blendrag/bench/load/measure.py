"""Both measurements from start to end: texts, engine or server, stored documents, then the arms in turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blendrag.bench.load.clients import Client, Reply, send
from blendrag.bench.load.figures import Figures, Goal
from blendrag.bench.load.prompts import Lengths, Prompts
from blendrag.bench.load.run import NEIGHBOUR_TOKENS, Load, Traffic, run
from blendrag.bench.load.target import ARMS, Target
from blendrag.bench.load.turns import Conversations, Style, TurnFigure, converse
from blendrag.bench.load.workload import Shape, Workload
from blendrag.bench.texts import Vocabulary
from blendrag.errors import BlendError
from blendrag.files import write
from blendrag.models import resolve
from blendrag.prompt import BlendPrompt
from blendrag.tokens import SegmentTokenizer

OnProgress = Callable[[str, int, int], None]
"""Called with (what is under way, requests done, requests in all)."""

_WARM_UPS = 3
_SLACK_TOKENS = 64
"""A server tokenises a prompt as one text, which may take some more tokens than its parts do."""


@dataclass(frozen=True)
class LoadPlan:
    """What `measure_load` measures.

    Attributes:
        real: documents to use instead of made-up ones.
        cold: nothing is stored before; documents get into the store by traffic alone.
        export: file for the prompts of the first load, as `vllm bench serve --dataset-name custom` reads them.
        quiet_s: seconds before each run, in which the engine encodes what the traffic before left to encode.
    """

    workload: Workload
    lengths: Lengths
    loads: Sequence[Load]
    goal: Goal
    neighbours: int = 0
    probe_rate: float = 0.0
    real: Sequence[str] = ()
    cold: bool = False
    export: Path | None = None
    quiet_s: float = 5.0

    def traffic(self, vocabulary: Vocabulary) -> list[Traffic]:
        """What is sent under each load: the same requests, whose new documents are new each time."""
        requests = self.workload.arrange()
        result: list[Traffic] = []
        for series in range(len(self.loads)):
            prompts = Prompts(vocabulary, self.lengths, self.workload.documents, self.real, series)
            texts = prompts.requests(requests) if self.workload.shape is Shape.CHAT or not result else result[0].prompts
            result.append(Traffic(requests, texts, self.lengths.answer, prompts.short, self.neighbours,
                                  self.probe_rate, self.workload.seed))
        return result


async def measure_load(target: Target, plan: LoadPlan, on_progress: OnProgress) -> list[Figures]:
    """Sends every load plain and blended; figures of both arms in turn, load by load.

    Raises:
        BlendError: an engine or server that does not run, or nothing but failed requests.
    """
    tokens = load_tokens(target.model)
    vocabulary = Vocabulary(tokens, plan.workload.seed)
    traffic = plan.traffic(vocabulary)
    longest = _longest(tokens, (prompt for one in traffic for prompt in one.prompts)) + plan.lengths.answer
    longest = max(longest, NEIGHBOUR_TOKENS if plan.neighbours else 0)
    prompts = Prompts(vocabulary, plan.lengths, plan.workload.documents, plan.real, series=-1)
    if plan.export is not None:
        lines = [{"prompt": prompt.text, "output_tokens": plan.lengths.answer} for prompt in traffic[0].prompts]
        write(plan.export, "".join(json.dumps(line) + "\n" for line in lines))
    figures = []
    async with target.open(longest + _SLACK_TOKENS) as clients:
        await _prepare(clients, plan, prompts)
        for load, one in zip(plan.loads, traffic, strict=True):
            for arm in ARMS:
                await asyncio.sleep(plan.quiet_s)
                count = _counter(f"{load.label}, {arm}", len(one.requests), on_progress)
                figures.append(Figures.of(arm, load, await run(clients[arm], one, load, count), plan.goal))
    return figures


async def measure_turns(target: Target, conversations: Conversations, styles: Sequence[Style], lengths: Lengths,
                        real: Sequence[str], on_progress: OnProgress) -> list[TurnFigure]:
    """Holds conversations of each style, plain and blended; raises as `measure_load`."""
    tokens = load_tokens(target.model)
    prompts = Prompts(Vocabulary(tokens, conversations.seed), lengths, conversations.pool, real)
    longest = _longest(tokens, (prompt for style in styles for number in range(conversations.count)
                                for prompt in conversations.prompts(style, number, prompts)))
    figures = []
    async with target.open(longest + lengths.answer + _SLACK_TOKENS) as clients:
        documents = [prompts.document(number) for number in range(conversations.pool)]
        await _store(clients, documents, prompts, anywhere=True, at_once=conversations.per_turn)
        warm_up = Conversations(1, 1, conversations.per_turn, conversations.pool, conversations.seed + 1)
        await converse(clients, warm_up, Style.SAME, prompts, lengths.answer)
        for style in styles:
            count = _counter(f"documents {style}", len(ARMS) * conversations.count * conversations.turns, on_progress)
            figures += await converse(clients, conversations, style, prompts, lengths.answer, count)
    return figures


def load_tokens(model: str) -> SegmentTokenizer:
    """The tokenizer of a model, without an engine; BlendError where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return SegmentTokenizer(AutoTokenizer.from_pretrained(resolve(model)))
    except (OSError, ValueError) as error:
        raise BlendError(f"the tokenizer of {model!r} cannot be loaded ({str(error).splitlines()[0]}): name the model "
                         "that is measured, as a folder or as a hub knows it") from error


async def _prepare(clients: Mapping[str, Client], plan: LoadPlan, prompts: Prompts) -> None:
    """Stores the pool, unless the measurement starts cold, and warms both arms up."""
    size = plan.workload.documents
    per_request = size if plan.workload.shape is Shape.PERMUTE else plan.workload.per_request
    warm = range(min(per_request, size))
    if plan.cold:
        warm = range(size, size + per_request)
    else:
        documents = [prompts.document(number) for number in range(size)]
        await _store(clients, documents, prompts, plan.workload.shape is Shape.CHAT, per_request)
    for number in range(_WARM_UPS):
        prompt = prompts.conversation([prompts.turn(-1, number, warm)])
        for client in clients.values():
            reply = await send(client, number, prompt, plan.lengths.answer)
            if reply.failure:
                raise BlendError(reply.failure)


async def _store(clients: Mapping[str, Client], documents: Sequence[str], prompts: Prompts, anywhere: bool,
                 at_once: int) -> None:
    for client in clients.values():
        await client.store(documents, prompts.prefix, anywhere, at_once)


def _longest(tokens: SegmentTokenizer, prompts: Iterable[BlendPrompt]) -> int:
    """Length of the longest prompt, in tokens."""
    return max(len(tokens(prompt).ids) for prompt in prompts)


def _counter(label: str, total: int, on_progress: OnProgress) -> Callable[[Reply], None]:
    done = 0

    def count(_: Reply) -> None:
        nonlocal done
        done += 1
        on_progress(label, done, total)

    on_progress(label, 0, total)
    return count
