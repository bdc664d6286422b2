"""One turn of a conversation: the prompt that asks for it, what holds the answer to a form, and how it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blendrag import BlendConfig, BlendOutput
from blendrag.adapters.chat import chat_template_of, reads_tools
from blendrag.adapters.chat_prompt import chat_prompt
from blendrag.adapters.replies import Reply, ReplyDelta
from blendrag.adapters.tools import Tool, ToolUse, answer_form, tool_use
from blendrag.errors import ConfigError, PromptError


class ChatTurn:
    """What a chat model is asked, in the terms of OpenAI's API.

    >>> turn = ChatTurn(engine.tokenizer, engine.config, [{"role": "user", "content": "Where is Paris?"}])
    >>> call = split_arguments(defaults, arguments | turn.sampling)
    >>> [output] = engine.generate(turn.prompt, call.params, **call.options)
    >>> turn.reply(output).content
    'Paris is in France.'

    Args:
        tokenizer: the model's.
        config: of the engine; its delimiter, where it has one, marks chunks in the messages.
        messages: `{"role": ..., "content": text}`, with `tool_calls` and `tool_call_id` where there are any.
        tools: that the model may call, `{"type": "function", "function": {...}}` each.
        tool_choice: "auto", "none", "required", or the name of the tool that must be called.
        parallel_tool_calls: the model may call several tools at once.
        response_format: `{"type": "json_schema", "json_schema": {"schema": ...}}` or `{"type": "json_object"}`
            holds the answer to JSON.
        chat_template: a Jinja template to use in place of the model's.
        variables: for the template, such as `enable_thinking`.
        tool_parser: name of vLLM's parser for the tool calls of this model; "auto" tells it by the template.
        documents: texts that are chunks wherever they stand in the messages, besides those that the messages mark.

    Attributes:
        prompt: what the model is sent.
        sampling: fields of vLLM's `SamplingParams` that the turn needs.

    Raises:
        PromptError: the template does not take the messages, shows no tools or changes a document that spells a control
            token, or tool_choice names no tool.
        ConfigError: an unknown response format, or one beside a call that is forced.
    """

    def __init__(self, tokenizer: Any, config: BlendConfig, messages: Sequence[Mapping[str, Any]], *,
                 tools: Sequence[Tool] = (), tool_choice: str = "auto", parallel_tool_calls: bool = True,
                 response_format: Mapping[str, Any] | None = None, chat_template: str | None = None,
                 variables: Mapping[str, Any] | None = None, tool_parser: str = "auto",
                 documents: Iterable[str] = ()) -> None:
        shown: dict[str, Any] = dict(variables or {})
        template = chat_template_of(tokenizer, chat_template, bool(tools))
        if tools:
            if not reads_tools(template):
                raise PromptError("the chat template does not show tools to the model: pass one that does as "
                                  "chat_template, or leave the tools out")
            shown["tools"] = [dict(tool) for tool in tools]
        self._use = tool_use(tools, tool_choice, parallel=parallel_tool_calls, template=template, parser=tool_parser,
                             tokenizer=tokenizer)
        self.sampling = dict(self._use.sampling)
        if (form := answer_form(response_format)) is not None:
            if "structured_outputs" in self.sampling:
                raise ConfigError("a tool call that is forced has a form of its own: leave response_format out, or "
                                  'tool_choice at "auto"')
            self.sampling["structured_outputs"] = form
            self._use = ToolUse()
        self.prompt = chat_prompt(tokenizer, messages, config, template, documents=documents, variables=shown)

    def reply(self, output: BlendOutput, candidate: int = 0) -> Reply:
        """The finished answer of one of the output's samples."""
        chosen = output.outputs[candidate]
        return Reply.of(self._use.reader().feed(chosen.text, list(chosen.token_ids), True))

    def stream(self) -> ReplyStream:
        """A reader of the answer as it comes."""
        return ReplyStream(self._use)


class ReplyStream:
    """What is new in each output of `BlendEngine.stream`."""

    def __init__(self, use: ToolUse) -> None:
        self._reader = use.reader()

    def read(self, output: BlendOutput) -> ReplyDelta:
        """What this output adds to those before; its first sample counts."""
        return self._reader.feed(output.text, output.token_ids, output.finished)
