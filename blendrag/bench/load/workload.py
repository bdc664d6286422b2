"""Which documents each request of a load has, and when it arrives; no text and no engine yet."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from blendrag.errors import ConfigError


class Shape(StrEnum):
    """How the documents of a request are chosen.

    RAG: a random subset of a pool, in random order, some documents more popular than others (LMCache's
    kv-tier-pressure).  PERMUTE: all documents of the pool, in a new order each time (its long-doc-permutator).  CHAT:
    conversations; some documents were retrieved before, in this conversation or another, the others never.
    """

    RAG = "rag"
    PERMUTE = "permute"
    CHAT = "chat"


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: its place in the order of arrival, from 0.
        arrival: seconds after the start, at a rate of one request a second.
        documents: numbers of its documents in the order of the prompt; those of the pool come first in counting, new
            documents follow.
        conversation: requests of one conversation continue it, each after the answer to the one before.
        turn: its place in the conversation, from 0.
    """

    number: int
    arrival: float
    documents: tuple[int, ...]
    conversation: int
    turn: int = 0


@dataclass(frozen=True)
class Workload:
    """A sequence of requests, the same for the same parameters.

    Attributes:
        requests: how many.
        documents: size of the pool.
        zipf: document k of the pool is chosen with a probability proportional to k**-zipf; 0: all alike.
        per_request: documents of a request (RAG, CHAT).
        users: conversations that are open at a time (CHAT).
        max_turns: a conversation has 1 to so many turns, each number as likely as another (CHAT).
        seen: share of the requests' documents that were retrieved before: all of the pool's were (CHAT).
        repeated: share of the requests' documents that their conversation had before; a part of `seen` (CHAT).
        seed: other seeds give other sequences.
    """

    shape: Shape = Shape.RAG
    requests: int = 100
    documents: int = 64
    zipf: float = 0.9
    per_request: int = 8
    users: int = 4
    max_turns: int = 8
    seen: float = 0.43
    repeated: float = 0.21
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError where the parameters contradict each other."""
        if self.shape is Shape.RAG and self.per_request > self.documents:
            raise ConfigError(f"a request has {self.per_request} documents and the pool {self.documents}: make the "
                              "pool larger, or requests smaller")
        if self.repeated > self.seen:
            raise ConfigError(f"documents that a conversation repeats are a part of those seen before, and "
                              f"{self.repeated:g} is more than {self.seen:g}: lower the first or raise the second")

    def arrange(self) -> list[Request]:
        """The requests in order of arrival, a Poisson process."""
        clock, at = random.Random(f"{self.seed} arrivals"), 0.0
        result = []
        for number, (conversation, turn, documents) in enumerate(self._choices()):
            result.append(Request(number, at, documents, conversation, turn))
            at += clock.expovariate(1.0)
        return result

    def _choices(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Conversation, turn and documents of each request."""
        pool = _Pool(self.documents, self.zipf, random.Random(f"{self.seed} documents"))
        if self.shape is Shape.CHAT:
            yield from _Conversations(self, pool).requests()
            return
        for number in range(self.requests):
            yield number, 0, pool.order() if self.shape is Shape.PERMUTE else pool.pick(self.per_request)


class _Pool:
    """Documents of Zipf-distributed popularity."""

    def __init__(self, size: int, zipf: float, source: random.Random) -> None:
        self.size = size
        self._weights = [(rank + 1) ** -zipf for rank in range(size)]
        self._source = source

    def order(self) -> tuple[int, ...]:
        """All documents, in a random order."""
        return tuple(self._source.sample(range(self.size), self.size))

    def pick(self, count: int, without: Collection[int] = ()) -> tuple[int, ...]:
        """Up to `count` different documents in random order, none of `without`.

        A document of weight w is drawn before the others with probability w / sum of their weights, if each gets the
        key log(u) / w with u uniform in (0, 1) and the largest keys win (Efraimidis and Spirakis, 2006).
        """
        keys = [(math.log(1 - self._source.random()) / weight, number) for number, weight in enumerate(self._weights)]
        chosen = [number for _, number in sorted(keys, reverse=True) if number not in without][:count]
        self._source.shuffle(chosen)
        return tuple(chosen)


@dataclass
class _Conversation:
    number: int
    turns: int
    turn: int = 0
    documents: list[int] = field(default_factory=list)


class _Conversations:
    """Requests of the shape CHAT: each is the next turn of one of the open conversations.

    Whether a document is new, of the pool or repeated follows from how far the shares lag behind what they shall be, so
    that they come out right for short sequences as well.
    """

    def __init__(self, workload: Workload, pool: _Pool) -> None:
        self._workload = workload
        self._pool = pool
        self._source = random.Random(f"{workload.seed} conversations")
        self._opened = 0
        self._chosen = self._seen = self._repeated = 0
        self._next_new = workload.documents

    def requests(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Conversation, turn and documents of each."""
        conversations = [self._open() for _ in range(self._workload.users)]
        for _ in range(self._workload.requests):
            user = self._source.randrange(len(conversations))
            conversation = conversations[user]
            documents = self._retrieve(conversation)
            yield conversation.number, conversation.turn, documents
            conversation.documents += [number for number in documents if number not in conversation.documents]
            conversation.turn += 1
            if conversation.turn == conversation.turns:
                conversations[user] = self._open()

    def _open(self) -> _Conversation:
        self._opened += 1
        return _Conversation(self._opened - 1, self._source.randint(1, self._workload.max_turns))

    def _retrieve(self, conversation: _Conversation) -> tuple[int, ...]:
        documents: list[int] = []
        for _ in range(self._workload.per_request):
            documents.append(self._one(conversation, documents))
            self._chosen += 1
        self._source.shuffle(documents)
        return tuple(documents)

    def _one(self, conversation: _Conversation, documents: list[int]) -> int:
        before = [number for number in conversation.documents if number not in documents]
        if before and self._repeated < self._workload.repeated * (self._chosen + 1):
            self._repeated += 1
            self._seen += 1
            return self._source.choice(before)
        lagging = self._seen < self._workload.seen * (self._chosen + 1)
        if pick := self._pool.pick(1, without={*conversation.documents, *documents}) if lagging else ():
            self._seen += 1
            return pick[0]
        self._next_new += 1
        return self._next_new - 1
