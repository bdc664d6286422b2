"""`BlendLLM`: a LlamaIndex model that reuses the KV cache of the documents in its prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import PydanticProgramMode

from blendrag import BlendConfig, BlendEngine, BlendOutput, BlendPrompt
from blendrag.adapters import (
    Call,
    ChatTurn,
    answer_form,
    chat_template_of,
    gather,
    has_chat_template,
    iterate,
    lend_engine,
    reads_tools,
    shared_engine,
    split_arguments,
)
from blendrag.errors import ConfigError
from blendrag.reading import as_prompt
from llama_index.llms.blendrag._messages import selection_of, to_rows, tool_choice_of
from llama_index.llms.blendrag._responses import ChatReader, CompletionReader, R, Request


class BlendLLM(FunctionCallingLLM):
    """A model on vLLM that reuses the stored KV of document chunks at any place in a prompt.

    Chunks are what `blendrag.mark_chunks` marked in a prompt or a message, and stored chunks that the engine finds in
    them unmarked; each is reused where the store has it, and computed where it has not.  Building the object is cheap:
    the engine starts with the first use, and objects with equal model, config and engine arguments share one.

    `raw` of a response is `{"finish_reason": str, "stop_reason": str | None, "usage": {...}, "blend": ...}`, where
    "blend" is `BlendStats.to_dict()`; on a stream, the last response has it.

    A call takes any sampling parameter of vLLM's, and `blend=False`, `policy`, `ratio` and the policy's own settings:
    `llm.complete(text, policy="full", max_tokens=20)`.  `chat` takes `tools`, `tool_choice`, `parallel_tool_calls` in
    OpenAI's form too, and `chat` and `complete` take `response_format`.

    Tools need a chat template that shows them to the model (`metadata.is_function_calling_model`).  A call that is
    required is guided by the tools' schemas, so any such model makes it; `structured_predict` and `as_structured_llm`
    show the schema in the prompt and hold the answer to it, which works with any model.

    Example:
        >>> from llama_index.llms.blendrag import BlendLLM
        >>> llm = BlendLLM("Qwen/Qwen3-8B", temperature=0, config={"store_path": "~/kv"})
        >>> index.as_query_engine(llm=llm).query("Where is Paris?")

    Args:
        model: name or folder of the model, as vLLM takes it.
        engine: an engine to use instead of one of our own; it brings its model, config and engine arguments.
    """

    model: str = Field(description="Name or folder of the model, as vLLM takes it.")
    config: BlendConfig = Field(default_factory=BlendConfig, description="Blending and the chunk store.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Further engine arguments of vLLM's.")
    temperature: float | None = Field(default=None, description="Sampling temperature; 0 is greedy.")
    max_tokens: int | None = Field(default=512, description="Longest answer, in tokens; None: as the context allows.")
    sampling_args: dict[str, Any] = Field(default_factory=dict, description="Further fields of vLLM's SamplingParams.")
    chat_template: str | None = Field(default=None, description="A Jinja template to use in place of the model's.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Variables for the template.")
    tool_parser: str = Field(default="auto", description="vLLM's parser of this model's tool calls; auto: by template.")
    pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.LLM

    _given_engine: BlendEngine | None = PrivateAttr(default=None)
    _engine: BlendEngine | None = PrivateAttr(default=None)

    def __init__(self, model: Any = None, *, engine: BlendEngine | None = None, **fields: Any) -> None:
        if unknown := sorted(set(fields) - set(type(self).model_fields) - {"class_name"}):
            raise ConfigError(f"BlendLLM has no argument {unknown[0]!r}: vLLM's engine arguments go into engine_args, "
                              "its sampling parameters into sampling_args, blending's into config")
        if engine is not None:
            own = {"model": engine.model, "config": engine.config, "engine_args": dict(engine.engine_args)}
            if model is not None or own.keys() & fields.keys():
                raise ConfigError("an engine brings its model, config and engine_args: leave them out beside engine=")
            fields |= own
            lend_engine(engine)
        elif model is None:
            raise ConfigError("BlendLLM needs a model: pass its name or folder, or engine=")
        else:
            fields["model"] = str(model)
        super().__init__(**fields)
        self._given_engine = engine

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "BlendLLM"

    @property
    def engine(self) -> BlendEngine:
        """The engine that answers; objects with equal settings share it."""
        if self._given_engine is not None:
            return self._given_engine
        if self._engine is None or self._engine.closed:
            self._engine = shared_engine(self.model, self.config, self.engine_args)
        return self._engine

    def close(self) -> None:
        """Closes the engine, for every object that shares it, and frees its memory; a later call starts it anew."""
        self.engine.close()

    @property
    def metadata(self) -> LLMMetadata:
        """The engine's real context window; a chat model where there is a chat template, which may show tools."""
        tokenizer, template = self.engine.tokenizer, self.chat_template
        chats = template is not None or has_chat_template(tokenizer)
        return LLMMetadata(
            context_window=self.engine.max_model_len,
            num_output=-1 if self.max_tokens is None else self.max_tokens,
            is_chat_model=chats,
            is_function_calling_model=chats and reads_tools(chat_template_of(tokenizer, template, tools=True)),
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """What instrumentation events say of the model; the metadata would start the engine, on an event loop too."""
        return {"class_name": self.class_name(), "model_name": self.model, "temperature": self.temperature,
                "max_tokens": self.max_tokens}

    def render(self, template: BasePromptTemplate, **variables: Any) -> BlendPrompt:
        """The prompt that `predict` sends the model; `engine.encode(chunks, prefix=...)` takes it for a prefix."""
        if self.metadata.is_chat_model:
            return self._turn(self._get_messages(template, **variables), {}).prompt
        return self._text(self._get_prompt(template, **variables), formatted=True)

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """The text that a model without a chat template completes; marks are read in each message by itself."""
        assert self.messages_to_prompt is not None
        join = self.messages_to_prompt
        formatted = prompt.format(self, messages_to_prompt=lambda messages: join([*map(self._paired, messages)]),
                                  completion_to_prompt=self.completion_to_prompt, **prompt_args)
        return self._extend_prompt(self.output_parser.format(formatted) if self.output_parser else formatted)

    def _paired(self, message: ChatMessage) -> ChatMessage:
        """The message with its marks as pairs, which are no others' where several messages become one text."""
        blocks = [block.model_copy(update={"text": self._read(block.text).to_text()}) if isinstance(block, TextBlock)
                  else block for block in message.blocks]
        return message.model_copy(update={"blocks": blocks})

    # Completion and chat.

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Completes text as it is; documents are chunks where it marks them."""
        return self._answer(self._completion(prompt, formatted, kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like `complete`, token by token."""
        return _each(self._outputs(partial(self._completion, prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like `complete`, without blocking the event loop; cancelling it stops the request in the engine."""
        return await self._aanswer(partial(self._completion, prompt, formatted, kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False,
                               **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like `stream_complete`, without blocking the event loop; leaving it stops the request in the engine."""
        return _aeach(partial(self._outputs, partial(self._completion, prompt, formatted, kwargs)))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers a conversation, in the model's own chat template."""
        return self._answer(self._conversation(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like `chat`, token by token."""
        return _each(self._outputs(partial(self._conversation, messages, kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like `chat`, without blocking the event loop; cancelling it stops the request in the engine."""
        return await self._aanswer(partial(self._conversation, messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like `stream_chat`, without blocking the event loop; leaving it stops the request in the engine."""
        return _aeach(partial(self._outputs, partial(self._conversation, messages, kwargs)))

    # Tools.

    def _prepare_chat_with_tools(self, tools: Sequence[BaseTool], user_msg: str | ChatMessage | None = None,
                                 chat_history: list[ChatMessage] | None = None, verbose: bool = False,
                                 allow_parallel_tool_calls: bool = False, tool_required: bool = False,
                                 tool_choice: str | dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
        message = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
        shown = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        choice = tool_choice_of(tool_choice, tool_required, [tool["function"]["name"] for tool in shown])
        return {"messages": [*(chat_history or []), *([message] if message else [])], "tools": shown,
                "tool_choice": choice, "parallel_tool_calls": allow_parallel_tool_calls, **kwargs}

    def _validate_chat_with_tools_response(self, response: ChatResponse, tools: Sequence[BaseTool],
                                           allow_parallel_tool_calls: bool = False, **kwargs: Any) -> ChatResponse:
        """A model that chose freely may have called several tools: the first one counts."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not allow_parallel_tool_calls and len(calls) > 1:
            message = response.message
            message.blocks = [block for block in message.blocks if block not in calls[1:]]
            message.additional_kwargs["tool_calls"] = message.additional_kwargs["tool_calls"][:1]
        return response

    def get_tool_calls_from_response(self, response: ChatResponse, error_on_no_tool_call: bool = True,
                                     **kwargs: Any) -> list[ToolSelection]:
        """The tools that a response calls; arguments that are still incomplete are read as far as they go.

        Raises:
            ValueError: it calls none, unless that is no error.
        """
        calls = [selection_of(block) for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError("the model called no tool: pass tool_required=True, or error_on_no_tool_call=False")
        return calls

    # Objects.

    def structured_predict(self, output_cls: type[BaseModel], prompt: Any, llm_kwargs: dict[str, Any] | None = None,
                           **prompt_args: Any) -> Any:
        """An object of a class: the prompt shows its schema, and the answer is held to it."""
        return super().structured_predict(output_cls, prompt, self._held_to(output_cls, llm_kwargs), **prompt_args)

    async def astructured_predict(self, output_cls: type[BaseModel], prompt: Any,
                                  llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any) -> Any:
        """Like `structured_predict`, without blocking the event loop."""
        return await super().astructured_predict(output_cls, prompt, self._held_to(output_cls, llm_kwargs),
                                                 **prompt_args)

    def stream_structured_predict(self, output_cls: type[BaseModel], prompt: Any,
                                  llm_kwargs: dict[str, Any] | None = None,
                                  **prompt_args: Any) -> Generator[Any, None, None]:
        """Like `structured_predict`; yields the object as it grows."""
        return super().stream_structured_predict(output_cls, prompt, self._held_to(output_cls, llm_kwargs),
                                                 **prompt_args)

    async def astream_structured_predict(self, output_cls: type[BaseModel], prompt: Any,
                                         llm_kwargs: dict[str, Any] | None = None,
                                         **prompt_args: Any) -> AsyncGenerator[Any, None]:
        """Like `stream_structured_predict`, without blocking the event loop."""
        return await super().astream_structured_predict(output_cls, prompt, self._held_to(output_cls, llm_kwargs),
                                                        **prompt_args)

    def _held_to(self, output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """The arguments of the call that asks for an object; a tool call has a form of its own."""
        mode = self.pydantic_program_mode
        if mode != PydanticProgramMode.LLM and (mode != PydanticProgramMode.DEFAULT
                                                or self.metadata.is_function_calling_model):
            return dict(llm_kwargs or {})
        schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
        return {"response_format": {"type": "json_schema", "json_schema": schema}} | dict(llm_kwargs or {})

    # Requests.

    def _completion(self, prompt: str, formatted: bool, arguments: dict[str, Any]) -> Request[CompletionResponse]:
        rest = dict(arguments)
        if (form := answer_form(rest.pop("response_format", None))) is not None:
            rest["structured_outputs"] = form
        return Request(self._text(prompt, formatted), self._call(rest), CompletionReader())

    def _conversation(self, messages: Sequence[ChatMessage], arguments: dict[str, Any]) -> Request[ChatResponse]:
        rest = dict(arguments)
        turn = self._turn(messages, rest)
        return Request(turn.prompt, self._call(rest | turn.sampling), ChatReader(turn))

    def _text(self, prompt: str, formatted: bool) -> BlendPrompt:
        assert self.completion_to_prompt is not None
        text = prompt if formatted else self.completion_to_prompt(prompt)
        return self._read(text)

    def _read(self, text: str) -> BlendPrompt:
        return as_prompt(text, self.config.delimiter, self.config.keep_delimiter)

    def _turn(self, messages: Sequence[ChatMessage], arguments: dict[str, Any]) -> ChatTurn:
        """The turn that answers the conversation; takes what belongs to it out of the arguments."""
        tools = list(arguments.pop("tools", None) or [])
        choice = tool_choice_of(arguments.pop("tool_choice", None), False, [])
        parallel = bool(arguments.pop("parallel_tool_calls", True))
        return ChatTurn(self.engine.tokenizer, self.config, to_rows(messages), tools=tools, tool_choice=choice,
                        parallel_tool_calls=parallel, response_format=arguments.pop("response_format", None),
                        chat_template=self.chat_template, variables=self.chat_template_kwargs,
                        tool_parser=self.tool_parser)

    def _call(self, arguments: dict[str, Any]) -> Call:
        defaults = {"temperature": self.temperature, "max_tokens": self.max_tokens} | self.sampling_args
        return split_arguments(defaults, arguments)

    def _answer(self, request: Request[R]) -> R:
        [output] = self.engine.generate([request.prompt], request.call.params, **request.call.options)
        return cast(R, request.read(output))

    async def _aanswer(self, make: Callable[[], Request[R]]) -> R:
        [(request, output)] = await gather([partial(self._outputs, make)])
        return cast(R, request.read(output))

    def _outputs(self, make: Callable[[], Request[R]]) -> Generator[tuple[Request[R], BlendOutput], None, None]:
        """Builds the request only once it runs, in the thread that may wait for the engine."""
        request = make()
        for output in self.engine.stream(request.prompt, request.call.params, **request.call.options):
            yield request, output


def _each(outputs: Generator[tuple[Request[R], BlendOutput], None, None]) -> Generator[R, None, None]:
    with closing(outputs):
        for request, output in outputs:
            if (response := request.read(output)) is not None:
                yield response


async def _aeach(start: Callable[[], Generator[tuple[Request[R], BlendOutput], None, None]]) -> AsyncGenerator[R, None]:
    async with aclosing(iterate(start)) as outputs:
        async for request, output in outputs:
            if (response := request.read(output)) is not None:
                yield response
