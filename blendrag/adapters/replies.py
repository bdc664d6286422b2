"""A model's answer, as text and tool calls, whole or in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ToolCall:
    """A tool the model calls.

    Attributes:
        id: names the call; the tool's answer refers to it.
        name: of the tool.
        arguments: JSON text as the model wrote it, which an answer that was cut short leaves incomplete.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """What is new of a tool call.

    Attributes:
        index: which call of the answer, from 0.
        id, name: in a call's first delta; None in those that follow.
        arguments: JSON text to append.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class ReplyDelta:
    """What is new of an answer."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class Reply:
    """An answer: its text without the tool calls, and these."""

    content: str
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, delta: ReplyDelta) -> Reply:
        """An answer that came in one piece."""
        calls: dict[int, ToolCall] = {}
        for new in delta.tool_calls:
            so_far = calls.get(new.index, ToolCall("", "", ""))
            calls[new.index] = ToolCall(so_far.id or new.id or "", so_far.name or new.name or "",
                                        so_far.arguments + new.arguments)
        return cls(delta.content, tuple(calls[index] for index in sorted(calls)))


class ReplyReader(Protocol):
    """Reads one answer as it grows."""

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ReplyDelta:
        """What is new.

        Args:
            text: of the answer so far, from its beginning.
            token_ids: the same in tokens.
            finished: nothing will follow.
        """


class TextReader:
    """An answer without tool calls."""

    def __init__(self) -> None:
        self._said = 0

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ReplyDelta:
        """The text that was added."""
        new = text[self._said:]
        self._said = len(text)
        return ReplyDelta(new)
