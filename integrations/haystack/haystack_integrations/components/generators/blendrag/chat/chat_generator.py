"""`BlendChatGenerator`: a chat generator that reuses the KV cache of the documents in its prompt."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator, Mapping
from contextlib import aclosing, closing
from copy import deepcopy
from os import PathLike
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.dataclasses import ChatMessage, ComponentInfo, StreamingCallbackT, select_streaming_callback
from haystack.tools import (
    ToolsType,
    deserialize_tools_or_toolset_inplace,
    flatten_tools_or_toolsets,
    serialize_tools_or_toolset,
)
from haystack.tools.tool import _check_duplicate_tool_names
from haystack.utils import deserialize_callable, serialize_callable

from blendrag import BlendConfig, BlendEngine, BlendOutput, BlendPrompt
from blendrag.adapters import ChatTurn, iterate
from blendrag.errors import ConfigError
from haystack_integrations.common.blendrag import EngineHandle, chunk_texts
from haystack_integrations.components.generators.blendrag.chat.replies import ReplyChunks, replies_of
from haystack_integrations.components.generators.blendrag.chat.request import ChatRequest, plain_format


@component
class BlendChatGenerator:
    """Completes chats with a model on vLLM, inside this process, reusing the KV cache of documents.

    A retrieved document is computed once, not with every question: its stored KV is placed wherever the prompt holds
    its text, in any order, next to any other document.  Connect the retriever to `documents` as well as to the prompt
    builder, and the documents are found in the rendered messages whatever the template does around them.  The messages
    themselves, and the text that the model reads, are those of any other chat generator.

    Usage example:

        >>> generator = BlendChatGenerator("Qwen/Qwen3-8B", generation_kwargs={"temperature": 0})
        >>> generator.run([ChatMessage.from_user("Where is Paris?")])["replies"][0].text
        'Paris is in France.'

    In a RAG pipeline:

        >>> pipeline.add_component("llm", BlendChatGenerator("Qwen/Qwen3-8B", config={"store_path": "~/kv"}))
        >>> pipeline.connect("retriever.documents", "prompt_builder.documents")
        >>> pipeline.connect("retriever.documents", "llm.documents")
        >>> pipeline.connect("prompt_builder.prompt", "llm.messages")

    A reply's `meta` has `model`, `index`, `finish_reason`, `stop_reason`, `usage`, `logprobs` where they were asked
    for, and `blend`: what was reused, and why not where it was not (`BlendStats.to_dict`).
    """

    def __init__(self, model: str | PathLike[str] | None = None, *,
                 config: BlendConfig | Mapping[str, Any] | None = None, engine_args: Mapping[str, Any] | None = None,
                 generation_kwargs: dict[str, Any] | None = None, streaming_callback: StreamingCallbackT | None = None,
                 tools: ToolsType | None = None, chat_template: str | None = None,
                 engine: BlendEngine | None = None) -> None:
        """Starts nothing: the model loads with `warm_up`, or with the first call.

        :param model: name or folder of the model, as vLLM takes it.
        :param config: settings of blending and of the chunk store, fields of `blendrag.BlendConfig`.
        :param engine_args: any of vLLM's engine arguments, such as `{"max_model_len": 8192}`.
        :param generation_kwargs: any of vLLM's sampling parameters, such as `temperature`, `max_tokens` and `stop`;
            `response_format` (a pydantic class, or OpenAI's form of a JSON schema), `tool_choice`,
            `parallel_tool_calls`, `tool_parser` (vLLM's, where the chat template does not tell it), `logprobs` and
            `top_logprobs`, `max_completion_tokens`, `chat_template_kwargs` (variables for the template, such as
            `{"enable_thinking": False}`); and `blend=False`, `policy`, `ratio` and the policy's own settings.
        :param streaming_callback: called with each `StreamingChunk` as tokens come.
        :param tools: that the model may call: tools, toolsets, or a list of both.
        :param chat_template: a Jinja template to use in place of the model's.
        :param engine: a `BlendEngine` to use; it brings its model, config and engine arguments.
        """
        _check_duplicate_tool_names(flatten_tools_or_toolsets(tools))
        self._handle = EngineHandle(type(self).__name__, model, config, engine_args, engine)
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback
        self.tools = tools
        self.chat_template = chat_template

    @property
    def model(self) -> str:
        """Name or folder of the model."""
        return self._handle.model

    @property
    def engine(self) -> BlendEngine:
        """The engine that answers, started or not; components with equal arguments share it."""
        return self._handle.engine

    def warm_up(self) -> None:
        """Loads the model, unless it is loaded."""
        self._handle.start()

    async def warm_up_async(self) -> None:
        """Like `warm_up`, without blocking the event loop."""
        await asyncio.to_thread(self.warm_up)

    def close(self) -> None:
        """Lets go of the engine, and frees its memory where no other component holds it; a call starts it anew."""
        self._handle.close()

    async def close_async(self) -> None:
        """Like `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def to_dict(self) -> dict[str, Any]:
        """The component as plain values."""
        kwargs = dict(self.generation_kwargs)
        if "response_format" in kwargs:
            kwargs["response_format"] = plain_format(kwargs["response_format"])
        callback = serialize_callable(self.streaming_callback) if self.streaming_callback else None
        return default_to_dict(self, **self._handle.init_parameters(), generation_kwargs=kwargs,
                               streaming_callback=callback, tools=serialize_tools_or_toolset(self.tools),
                               chat_template=self.chat_template)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BlendChatGenerator:
        """The inverse of `to_dict`; Haystack's allow-list decides which callbacks and tools may be imported."""
        values = deepcopy(data.get("init_parameters", {}))  # loading a tool changes what it is loaded from
        deserialize_tools_or_toolset_inplace(values, key="tools")
        if values.get("streaming_callback"):
            values["streaming_callback"] = deserialize_callable(values["streaming_callback"])
        return default_from_dict(cls, data | {"init_parameters": values})

    @component.output_types(replies=list[ChatMessage])
    def run(self, messages: list[ChatMessage] | str, streaming_callback: StreamingCallbackT | None = None,
            generation_kwargs: dict[str, Any] | None = None, *, tools: ToolsType | None = None,
            documents: list[Document] | None = None) -> dict[str, list[ChatMessage]]:
        """Answers a conversation.

        :param messages: the conversation; a string is one message of the user.
        :param streaming_callback: overrides that of the component.
        :param generation_kwargs: override those of the component, key by key.
        :param tools: override those of the component.
        :param documents: the documents that the messages hold, as the prompt builder got them: their KV is reused
            wherever their text stands.  A document that the messages do not hold, character by character but for white
            space at its ends, changes nothing.
        :returns: `{"replies": [...]}`, one message, or `n` of them.
        """
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=False)
        request = self._request(messages, generation_kwargs, tools, documents, callback)
        if not request.messages:
            return {"replies": []}
        chunks: ReplyChunks | None = None
        with closing(self._outputs(request)) as outputs:
            for turn, output in outputs:
                if callback is not None:
                    chunks = chunks or self._chunks(turn)
                    for chunk in chunks.read(output):
                        callback(chunk)
        return {"replies": [chunks.message(output)] if chunks else replies_of(turn, output, self.model)}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(self, messages: list[ChatMessage] | str, streaming_callback: StreamingCallbackT | None = None,
                        generation_kwargs: dict[str, Any] | None = None, *, tools: ToolsType | None = None,
                        documents: list[Document] | None = None) -> dict[str, list[ChatMessage]]:
        """Like `run`, without blocking the event loop; cancelling it stops the request in the engine.

        The callback may be a coroutine function; one that is not runs on the event loop.
        """
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=True)
        request = self._request(messages, generation_kwargs, tools, documents, callback)
        if not request.messages:
            return {"replies": []}
        chunks: ReplyChunks | None = None
        async with aclosing(iterate(lambda: self._outputs(request))) as outputs:
            async for turn, output in outputs:
                if callback is not None:
                    chunks = chunks or self._chunks(turn)
                    for chunk in chunks.read(output):
                        waiting = callback(chunk)
                        if inspect.isawaitable(waiting):
                            await waiting
        return {"replies": [chunks.message(output)] if chunks else replies_of(turn, output, self.model)}

    def to_prompt(self, messages: list[ChatMessage] | str, generation_kwargs: dict[str, Any] | None = None, *,
                  tools: ToolsType | None = None, documents: list[Document] | None = None) -> BlendPrompt:
        """The prompt that a call with these arguments sends to the model.

        Its `prefix`, the text before the first document, is what a `BlendDocumentWriter` may encode documents behind.
        """
        return self._request(messages, generation_kwargs, tools, documents).turn(self.engine).prompt

    def _request(self, messages: list[ChatMessage] | str, generation_kwargs: dict[str, Any] | None,
                 tools: ToolsType | None, documents: list[Document] | None,
                 callback: StreamingCallbackT | None = None) -> ChatRequest:
        arguments = self.generation_kwargs | (generation_kwargs or {})
        if callback is not None and (arguments.get("n") or 1) > 1:
            raise ConfigError("one answer can be streamed, not several: set n=1, or leave streaming_callback out")
        flat = flatten_tools_or_toolsets(self.tools if tools is None else tools)
        _check_duplicate_tool_names(flat)
        rows = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        return ChatRequest(rows, arguments, flat, chunk_texts(documents or []), self.chat_template)

    def _outputs(self, request: ChatRequest) -> Generator[tuple[ChatTurn, BlendOutput], None, None]:
        """The answer so far, each time there is more of it; waits for the engine's start."""
        engine = self.engine
        turn = request.turn(engine)
        call = request.call(turn)
        for output in engine.stream(turn.prompt, call.params, **call.options):
            yield turn, output

    def _chunks(self, turn: ChatTurn) -> ReplyChunks:
        return ReplyChunks(turn, self.model, ComponentInfo.from_component(self))
