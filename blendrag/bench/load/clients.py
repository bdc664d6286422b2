"""What sends the requests of a load, and what it says about each."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from blendrag.errors import BlendError
from blendrag.prompt import BlendPrompt


@dataclass(frozen=True)
class Usage:
    """Tokens of one finished request.

    Attributes:
        prompt: length of the prompt.
        cached: prompt tokens that were not computed, by vLLM's count.
        reused: those of them that came from stored chunks; None where only the total over requests is known.
        output: generated tokens.
        rows: share of a full prefill's rows that was computed (`BlendStats.rows`); None where unknown.
    """

    prompt: int
    cached: int
    reused: int | None
    output: int
    rows: float | None = None


class Client(Protocol):
    """Sends prompts to one engine, all of them blended or all of them plain."""

    async def store(self, documents: Sequence[str], prefix: str, anywhere: bool, at_once: int) -> None:
        """Stores the KV of documents; nothing for a plain client.

        Args:
            prefix: the text before the first document of prompts.
            anywhere: other text may stand before the first document, too.
            at_once: documents that fit into one prompt.
        """

    async def reset(self) -> None:
        """Empties vLLM's prefix cache; stored chunks stay."""

    def stream(self, prompt: BlendPrompt, output_tokens: int) -> AsyncGenerator[Usage | None, None]:
        """Generates exactly so many tokens; yields None whenever some have come, and at last the usage.

        Raises:
            BlendError: the request failed.
        """

    async def reused_tokens(self) -> int | None:
        """Prompt tokens that came from stored chunks, over all requests so far; None where each `Usage` says it."""


@dataclass(frozen=True)
class Reply:
    """One request as its client saw it.

    Attributes:
        number: which request it was.
        moments: when tokens came, in seconds of `time.perf_counter`.
        usage: None for a request that failed.
        failure: why.
    """

    number: int
    sent: float
    moments: tuple[float, ...] = ()
    usage: Usage | None = None
    failure: str = ""

    @property
    def first_token_s(self) -> float:
        """From sending the request to its first token."""
        return self.moments[0] - self.sent

    @property
    def token_s(self) -> float | None:
        """Mean time per output token behind the first; None for one that has no more."""
        more = self.usage.output - 1 if self.usage else 0
        return (self.moments[-1] - self.moments[0]) / more if more > 0 else None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Of the times between tokens: when each ended, and how long it was."""
        return [(after, after - before) for before, after in pairwise(self.moments)]


async def send(client: Client, number: int, prompt: BlendPrompt, output_tokens: int,
               moments: list[float] | None = None) -> Reply:
    """Sends one request and waits for its end; one that fails says so in the reply.

    Args:
        moments: filled while tokens come, for those who look at a request that is under way.
    """
    moments = [] if moments is None else moments
    usage = None
    sent = time.perf_counter()
    try:
        async with aclosing(client.stream(prompt, output_tokens)) as pieces:
            async for usage in pieces:
                if usage is None:
                    moments.append(time.perf_counter())
    except BlendError as error:
        return Reply(number, sent, tuple(moments), failure=str(error))
    if not moments or usage is None:
        return Reply(number, sent, tuple(moments), failure="the answer held no token, or did not say its usage")
    return Reply(number, sent, tuple(moments), usage)
