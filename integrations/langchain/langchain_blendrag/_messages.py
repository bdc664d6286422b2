"""LangChain messages to a prompt that knows its chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blendrag.adapters import render_chat
from langchain_core.messages import BaseMessage, convert_to_openai_messages

from langchain_blendrag._settings import EngineSettings


def chat_text(model: EngineSettings, messages: Sequence[BaseMessage], template: str | None,
              variables: Mapping[str, Any]) -> str:
    """The conversation as prompt text, special tokens and chunk delimiters in it."""
    rows = convert_to_openai_messages(list(messages), text_format="string")
    return render_chat(model.engine.tokenizer, rows, template, **variables)
