"""Conversations over stored documents, one at a time: the first token of each turn, plain and blended."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from random import Random
from typing import Any

from blendrag.bench.load.clients import Client, Reply, Usage, send
from blendrag.bench.load.figures import Ledger
from blendrag.bench.load.prompts import Prompts, Turn
from blendrag.errors import BlendError, ConfigError
from blendrag.prompt import BlendPrompt


class Style(StrEnum):
    """What becomes of a conversation's documents.

    SAME: those of the first turn stay, no others come.  REPLACED: each turn has its own, which stand before its
    question; earlier turns leave question and answer.  ACCUMULATED: each turn adds its own, and all stay.
    """

    SAME = "same"
    REPLACED = "replaced"
    ACCUMULATED = "accumulated"


@dataclass(frozen=True)
class Conversations:
    """What is measured.

    Attributes:
        count: conversations of each style.
        turns: of each conversation.
        per_turn: documents of a turn that has some.
        pool: documents that are stored, from which they are drawn.
        seed: other seeds draw others.
    """

    count: int = 3
    turns: int = 4
    per_turn: int = 8
    pool: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError where the pool is too small."""
        if self.per_turn * self.turns > self.pool:
            raise ConfigError(f"{self.turns} turns of {self.per_turn} documents need more than the {self.pool} of the "
                              "pool: make it larger, or turns fewer")

    def prompts(self, style: Style, number: int, prompts: Prompts) -> list[BlendPrompt]:
        """The prompt of each turn of one conversation."""
        source = Random(f"{self.seed} {style} {number}")
        turns_with_documents = 1 if style is Style.SAME else self.turns
        documents = source.sample(range(self.pool), self.per_turn * turns_with_documents)
        turns: list[Turn] = []
        result = []
        for turn in range(self.turns):
            own = documents[turn * self.per_turn : (turn + 1) * self.per_turn]
            turns.append(prompts.turn(number, turn, own))
            result.append(prompts.conversation(turns))
            if style is Style.REPLACED:
                turns[-1] = Turn((), turns[-1].question, turns[-1].answer)
        return result


@dataclass(frozen=True)
class TurnFigure:
    """One turn of a style; times are medians over the conversations, in milliseconds, of "plain" and "blended".

    Attributes:
        turn: from 1; None for the sum over the turns of a conversation.
        prompt_tokens: mean length of the prompt.
        ttft_ms: time to the first token of each arm.
        computed: share of the prompt's tokens that each arm computed.
        ratio: plain's time / blended's.
    """

    style: Style
    turn: int | None
    prompt_tokens: float
    ttft_ms: Mapping[str, float]
    computed: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.ttft_ms["plain"] / self.ttft_ms["blended"]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio": self.ratio}


async def converse(clients: Mapping[str, Client], conversations: Conversations, style: Style, prompts: Prompts,
                   output_tokens: int, on_reply: Callable[[Reply], None] | None = None) -> list[TurnFigure]:
    """Holds the conversations of one style with every client, and returns a figure for each turn and one for all.

    Before each conversation vLLM's prefix cache holds the system prompt and nothing else.

    Args:
        clients: by arm, "plain" and "blended".

    Raises:
        BlendError: a request failed.
    """
    replies: dict[str, list[list[Reply]]] = {arm: [] for arm in clients}
    for number in range(conversations.count):
        asked = conversations.prompts(style, number, prompts)
        # In turns, so that neither arm is always the first.
        for arm in sorted(clients, reverse=number % 2 == 0):
            await clients[arm].reset()
            await _answer(clients[arm], BlendPrompt(prompts.prefix, "Hello"), 1)
            held = []
            for prompt in asked:
                held.append(await _answer(clients[arm], prompt, output_tokens))
                if on_reply is not None:
                    on_reply(held[-1])
            replies[arm].append(held)
    figures = [_figure(style, turn + 1, {arm: [[held[turn]] for held in many] for arm, many in replies.items()})
               for turn in range(conversations.turns)]
    return [*figures, _figure(style, None, replies)]


async def _answer(client: Client, prompt: BlendPrompt, output_tokens: int) -> Reply:
    reply = await send(client, 0, prompt, output_tokens)
    if reply.failure:
        raise BlendError(f"a conversation cannot be continued: {reply.failure}")
    return reply


def _figure(style: Style, turn: int | None, replies: Mapping[str, Sequence[Sequence[Reply]]]) -> TurnFigure:
    """Of requests of each arm, those of one conversation together."""
    usages = {arm: [[reply.usage for reply in held if reply.usage] for held in many] for arm, many in replies.items()}
    return TurnFigure(
        style, turn, statistics.fmean(sum(usage.prompt for usage in held) for held in usages["blended"]),
        {arm: 1e3 * statistics.median(sum(reply.first_token_s for reply in held) for held in many)
         for arm, many in replies.items()},
        {arm: _computed([usage for held in many for usage in held]) for arm, many in usages.items()})


def _computed(usages: Sequence[Usage]) -> float:
    ledger = Ledger.of(usages)
    return ledger.computed / max(1, ledger.prompt)
