"""What a chat generator is asked, translated into blendrag's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from haystack.dataclasses import ChatMessage
from haystack.tools.tool import Tool
from pydantic import BaseModel

from blendrag import BlendEngine
from blendrag.adapters import Call, ChatTurn, split_arguments

OF_THE_TURN = ("tool_choice", "parallel_tool_calls", "tool_parser", "response_format")
"""Generation arguments that concern the prompt and the form of the answer; the others concern sampling or blending."""


@dataclass(frozen=True)
class ChatRequest:
    """One call of a chat generator.

    Attributes:
        messages: the conversation.
        arguments: generation arguments, those of the component and of the call merged.
        tools: that the model may call.
        documents: texts that are chunks wherever the prompt holds them.
        chat_template: a Jinja template to use in place of the model's.
    """

    messages: Sequence[ChatMessage]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    documents: Sequence[str] = ()
    chat_template: str | None = None

    def turn(self, engine: BlendEngine) -> ChatTurn:
        """The prompt, and how its answer is read.  Starts the engine, whose tokenizer it takes."""
        options = {name: self.arguments[name] for name in OF_THE_TURN if self.arguments.get(name) is not None}
        if "response_format" in options:
            options["response_format"] = plain_format(options["response_format"])
        choice = options.get("tool_choice")
        if isinstance(choice, Mapping):  # {"type": "function", "function": {"name": ...}}
            options["tool_choice"] = choice["function"]["name"]
        return ChatTurn(engine.tokenizer, engine.config, [openai_message(message) for message in self.messages],
                        tools=[{"type": "function", "function": tool.tool_spec} for tool in self.tools],
                        chat_template=self.chat_template, documents=self.documents,
                        variables=self.arguments.get("chat_template_kwargs"), **options)

    def call(self, turn: ChatTurn) -> Call:
        """Sampling parameters and blend options; without `max_tokens` the context window is the limit."""
        rest = {name: value for name, value in self.arguments.items()
                if name not in (*OF_THE_TURN, "chat_template_kwargs")}
        if "max_completion_tokens" in rest:
            rest["max_tokens"] = rest.pop("max_completion_tokens")
        top = rest.pop("top_logprobs", None)
        if isinstance(rest.get("logprobs"), bool):  # OpenAI's form; vLLM's is the number
            rest["logprobs"] = (top or 0) if rest["logprobs"] else None
        return split_arguments({"max_tokens": None}, rest | turn.sampling)


def plain_format(response_format: Any) -> Any:
    """A response format as a mapping: a pydantic class becomes its JSON schema, anything else is left as it is."""
    if isinstance(response_format, type) and issubclass(response_format, BaseModel):
        return {"type": "json_schema", "json_schema": {"name": response_format.__name__, "strict": True,
                                                       "schema": response_format.model_json_schema()}}
    return response_format


def openai_message(message: ChatMessage) -> dict[str, Any]:
    """The message in the form that chat templates take; several parts of text become lines of one."""
    row = message.to_openai_dict_format(require_tool_call_ids=False)
    content = row.get("content")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        row["content"] = "\n".join(part["text"] for part in content)
    return row
