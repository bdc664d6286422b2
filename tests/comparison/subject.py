"""How a probe sees a model object: asking in common terms, whatever the framework calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tests.comparison.watch import Watch


class NotApplicable(Exception):  # noqa: N818  # not an error
    """The framework has no place for this feature, whoever fills it."""


@dataclass
class Answer:
    """What an object told of one answer, or of one piece of it; None where it told nothing.

    Attributes:
        texts: one for each sample.
        usage: prompt and completion tokens.
        cached: prompt tokens that were not computed.
        logprobs: how many tokens came with their log probability.
        calls: names and arguments of tool calls.
    """

    texts: list[str]
    finish: str | None = None
    stop: Any = None
    usage: tuple[int, int] | None = None
    cached: int | None = None
    logprobs: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first sample."""
        return self.texts[0]


@dataclass
class Column:
    """One class of the table, and what must be known of it to use it.

    Attributes:
        kind: the class.
        watch: looks into its engine.
        tokenizer: of the model that it runs.
        make: builds an object in the usual way, from further constructor arguments.
        nowhere: builds one whose model, or server, does not exist.
        variant: another object on the same engine, `variant(temperature=0.5)`; knows `temperature`, `stop`, `model`.
        translate: options in common terms to arguments of a call.  The terms are those of vLLM's `SamplingParams`,
            `logprobs=True`, and `choice`, a list of texts of which the answer must be one.
        tools: what shows tools to a model whose own template shows none: `fields` of the object, `options` of a call.
        stream_usage: options that ask for token counts at the end of a stream.
        store: computes the KV of texts ahead of time, where the class can.
        has_engine: whether the engine is the object's own, and not a server's.
    """

    kind: type
    watch: Watch
    tokenizer: Any
    make: Callable[..., Any]
    nowhere: Callable[[], Any]
    variant: Callable[..., Any]
    translate: Callable[[dict[str, Any]], dict[str, Any]]
    tools: dict[str, Any] = field(default_factory=dict)
    stream_usage: dict[str, Any] = field(default_factory=dict)
    store: Callable[[Sequence[str]], Any] = lambda texts: None
    has_engine: bool = True


class Subject(ABC):
    """A model object that is probed.

    Args:
        column: what it is an object of.
        model: the object.
    """

    def __init__(self, column: Column, model: Any) -> None:
        self.column = column
        self.watch = column.watch
        self.model = model

    def variant(self, **settings: Any) -> Subject:
        """The same with other settings, on the same engine."""
        return type(self)(self.column, self.column.variant(**settings))

    @abstractmethod
    def ask(self, prompt: str, **options: Any) -> Answer:
        """The whole answer to a user's message, or to a text where the object only completes texts."""

    @abstractmethod
    async def aask(self, prompt: str, **options: Any) -> Answer:
        """The same from a coroutine."""

    @abstractmethod
    def stream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        """The pieces of an answer; leaves the stream after that many."""

    @abstractmethod
    async def astream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        """The same from a coroutine."""

    @abstractmethod
    def converse(self, system: str, user: str, **options: Any) -> Answer:
        """The answer to a conversation, as the framework's users write one."""

    @abstractmethod
    def call_tools(self, prompt: str, tool_choice: str, **options: Any) -> Answer:
        """The answer to a message beside the tool `now(local: bool)`; `tool_choice` is "auto" or "now"."""

    @abstractmethod
    def structured(self, schema: type[BaseModel], prompt: str) -> Any:
        """An answer in the form of a pydantic class."""

    @abstractmethod
    def reloaded(self) -> Any:
        """The object, serialised and loaded again."""

    @abstractmethod
    def settings(self, model: Any) -> Any:
        """What such an object says that it was made of."""

    def batch(self, prompts: list[str], **options: Any) -> None:
        """Asks several prompts in one call of the framework."""
        raise NotApplicable

    def count_tokens(self, text: str) -> int:
        """Length of a text by the object's own method."""
        raise NotApplicable

    def context_window(self) -> int | None:
        """The context window that the framework is told."""
        raise NotApplicable

    def has_response_cache(self) -> bool:
        """Whether the framework caches answers by what an object says of itself."""
        return False
