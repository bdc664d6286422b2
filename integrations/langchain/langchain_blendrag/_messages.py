"""LangChain messages as chat templates take them, and the documents that came with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_openai_messages


def openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form."""
    rows: list[dict[str, Any]] = convert_to_openai_messages(list(map(_speech, messages)), text_format="string")
    for row, message in zip(rows, messages, strict=True):
        if isinstance(message, AIMessage) and message.invalid_tool_calls:  # the model shall see what it did
            row["tool_calls"] = [*row.get("tool_calls", []), *(
                {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
                for call in message.invalid_tool_calls)]
    return rows


def artifact_texts(messages: Sequence[BaseMessage]) -> Iterator[str]:
    """Texts of the documents that tools returned as their artifact, as `create_retriever_tool` does."""
    for message in messages:
        if isinstance(message, ToolMessage) and isinstance(message.artifact, (list, tuple)):
            for found in message.artifact:
                if isinstance(found, Document):
                    yield found.page_content


def _speech(message: BaseMessage) -> BaseMessage:
    """An answer of a model without blocks that repeat its tool calls or hold its reasoning."""
    if not isinstance(message, AIMessage) or isinstance(message.content, str):
        return message
    said = [block for block in message.content if isinstance(block, str) or block.get("type") == "text"]
    return message.model_copy(update={"content": said})
