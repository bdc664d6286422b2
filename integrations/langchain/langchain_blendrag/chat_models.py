"""`ChatBlend`: a chat model that reuses the KV cache of the documents in its messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

from blendrag import BlendOutput, BlendPrompt
from blendrag.adapters import ChatTurn, gather, iterate
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from langchain_blendrag._messages import artifact_texts, openai_messages
from langchain_blendrag._results import ChatChunks, chat_generation
from langchain_blendrag._settings import EngineSettings
from langchain_blendrag._structured import Method, Schema, structured
from langchain_blendrag._tools import choice_of

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""What can be bound: LangChain's tools, functions, pydantic or TypedDict classes, or OpenAI's form of a tool."""

OF_TURN = ("tools", "tool_choice", "parallel_tool_calls", "response_format")


class ChatBlend(EngineSettings, BaseChatModel):
    """A chat model on vLLM that reuses the stored KV of document chunks at any place in a conversation.

    The model's own chat template is applied.  Chunks are what `format_documents` marked in the messages, and the
    documents that tools return as their artifact, such as `create_retriever_tool` with
    `response_format="content_and_artifact"`; each is reused where the store has it, and computed where it has not.

    Example:
        >>> from langchain_blendrag import ChatBlend, format_documents
        >>> model = ChatBlend(model="Qwen/Qwen3-8B", temperature=0, config={"store_path": "~/kv"})
        >>> answer = model.invoke([("system", "Answer from these passages.\\n" + format_documents(documents)),
        ...                        ("human", "Where is Paris?")])
        >>> answer.usage_metadata["input_token_details"]["cache_read"]
        1872

    A call takes any sampling parameter of vLLM's, `response_format` and `logprobs=True, top_logprobs=5` as in OpenAI's
    API, and `blend=False`, `policy`, `ratio` and the policy's own settings:
    `model.invoke(messages, policy="full", max_tokens=20)`.
    """

    chat_template: str | None = None
    """A Jinja chat template to use in place of the model's."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the template, such as `{"enable_thinking": False}`."""

    tool_parser: str = "auto"
    """vLLM's parser for this model's tool calls, such as "hermes"; "auto" tells it by the chat template."""

    streaming: bool = False
    """Let `invoke` stream within, so that callbacks see each token."""

    @property
    def _llm_type(self) -> str:
        return "blendrag-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity() | {"chat_template": self.chat_template,
                                   "chat_template_kwargs": self.chat_template_kwargs, "tool_parser": self.tool_parser}

    def _resolve_model_profile(self) -> ModelProfile:
        """What is known before the model is loaded."""
        profile = ModelProfile(
            text_inputs=True, image_inputs=False, audio_inputs=False, video_inputs=False, pdf_inputs=False,
            text_outputs=True, tool_calling=True, tool_choice=True, tool_call_streaming=True,
            # Agents would ask for an answer in JSON beside tools, and so keep the model from calling any.
            structured_output=False)
        if length := self.engine_args.get("max_model_len"):
            profile["max_input_tokens"] = length
        if self.max_tokens is not None:
            profile["max_output_tokens"] = self.max_tokens
        return profile

    def bind_tools(self, tools: Sequence[Tool], *, tool_choice: Any = None, strict: bool | None = None,
                   parallel_tool_calls: bool | None = None, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        Args:
            tools: LangChain tools, functions, pydantic or TypedDict classes, or tools in OpenAI's form.
            tool_choice: "auto" (or None) lets the model choose, "none" forbids, "any" ("required", True) forces it to
                call a tool, a tool's name forces that one.  A forced call is guided by the tools' schemas, so that any
                model obeys.
            strict: makes all arguments required and admits no others.
            parallel_tool_calls: False for one call at most, where calls are forced.
            kwargs: bound too.
        """
        shown = [convert_to_openai_tool(dict(tool) if isinstance(tool, Mapping) else tool, strict=strict)
                 for tool in tools]
        options = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        return self.bind(tools=shown, **{name: value for name, value in options.items() if value is not None}, **kwargs)

    def with_structured_output(self, schema: Schema | None = None, *, include_raw: bool = False,
                               method: Method = "json_schema", strict: bool | None = None,
                               **kwargs: Any) -> Runnable[LanguageModelInput, Any]:
        """The model with answers in a form.

        Args:
            schema: a pydantic class, whose objects are returned, or a TypedDict class or JSON schema for a dict.
            include_raw: return `{"raw": message, "parsed": ..., "parsing_error": ...}`, and raise nothing.
            method: "json_schema" holds the answer to the schema by guided decoding; "function_calling" has the model
                call a tool of that form; "json_mode" holds it to JSON, and the prompt must say what shall be in it.
            strict: makes all fields required and admits no others.
            kwargs: bound too; `tools` for instance.
        """
        return structured(self, schema, method, include_raw, strict, **kwargs)

    def to_prompt(self, model_input: LanguageModelInput, **kwargs: Any) -> BlendPrompt:
        """The prompt that this input becomes; its `prefix` is what chunks are best encoded behind.

        Args:
            kwargs: of the call, `tools` for instance.
        """
        return self._turn(self._convert_input(model_input).to_messages(), kwargs).prompt

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Length of the whole prompt, chat template and tools included."""
        shown = {"tools": list(map(convert_to_openai_tool, tools))} if tools else {}
        return len(self.engine.tokens(self._turn(messages, shown).prompt).ids)

    def _turn(self, messages: Sequence[BaseMessage], arguments: Mapping[str, Any]) -> ChatTurn:
        parallel = arguments.get("parallel_tool_calls")
        return ChatTurn(self.engine.tokenizer, self.config, openai_messages(messages),
                        tools=arguments.get("tools") or (), tool_choice=choice_of(arguments.get("tool_choice")),
                        parallel_tool_calls=parallel is None or parallel,
                        response_format=arguments.get("response_format"), chat_template=self.chat_template,
                        variables=self.chat_template_kwargs, tool_parser=self.tool_parser,
                        documents=artifact_texts(messages))

    def _run(self, messages: Sequence[BaseMessage], stop: list[str] | None,
             arguments: Mapping[str, Any]) -> Generator[tuple[ChatTurn, BlendOutput], None, None]:
        turn = self._turn(messages, arguments)
        given = {name: value for name, value in arguments.items() if name not in OF_TURN}
        call = self._call(given | turn.sampling, stop)
        for output in self.engine.stream(turn.prompt, call.params, **call.options):
            yield turn, output

    def _chunks(self, messages: Sequence[BaseMessage], stop: list[str] | None,
                arguments: Mapping[str, Any]) -> Generator[ChatGenerationChunk, None, None]:
        chunks = None
        for turn, output in self._run(messages, stop, {**arguments, "n": 1}):
            chunks = chunks or ChatChunks(turn.stream(), self.model)
            yield chunks.add(output)

    def _result(self, turn: ChatTurn, output: BlendOutput) -> ChatResult:
        generations = [chat_generation(turn, output, number, self.model) for number in range(len(output.outputs))]
        return ChatResult(generations=generations, llm_output={"model_name": self.model})

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        *_, (turn, output) = self._run(messages, stop, kwargs)
        return self._result(turn, output)

    async def _agenerate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                         run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        [(turn, output)] = await gather([lambda: self._run(messages, stop, kwargs)])
        return self._result(turn, output)

    def _stream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        with closing(self._chunks(messages, stop, kwargs)) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(iterate(lambda: self._chunks(messages, stop, kwargs))) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
