"""`BlendLLM`: a LlamaIndex model that reuses the KV cache of the documents in its prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any, TypeVar

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
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM

from blendrag import BlendConfig, BlendEngine, BlendOutput, BlendPrompt
from blendrag.adapters import (
    Call,
    gather,
    has_chat_template,
    iterate,
    render_chat,
    shared_engine,
    split_arguments,
    usage_of,
)
from blendrag.errors import ConfigError, PromptError

R = TypeVar("R", CompletionResponse, ChatResponse)


class BlendLLM(LLM):
    """A model on vLLM that reuses the stored KV of document chunks at any place in a prompt.

    Chunks are what `blendrag.mark_chunks` marked in a prompt or a message; each is reused where the store has it, and
    computed where it has not.  Building the object is cheap: the engine starts with the first use, and objects with
    equal model, config and engine arguments share one.

    `raw` of a response is `{"finish_reason": str, "usage": {...}, "blend": BlendStats.to_dict()}`; on a stream, the
    last response has it.

    A call takes any sampling parameter of vLLM's, and `blend=False`, `policy`, `ratio` and the policy's own settings:
    `llm.complete(text, policy="full", max_tokens=20)`.

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
        """The engine's real context window; a chat model where there is a chat template."""
        return LLMMetadata(
            context_window=self.engine.max_model_len,
            num_output=-1 if self.max_tokens is None else self.max_tokens,
            is_chat_model=self.chat_template is not None or has_chat_template(self.engine.tokenizer),
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """What instrumentation events say of the model; the metadata would start the engine, on an event loop too."""
        return {"class_name": self.class_name(), "model_name": self.model, "temperature": self.temperature,
                "max_tokens": self.max_tokens}

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Completes text as it is; chunks are cut at the delimiter."""
        return _completion(self._generate(self._text(prompt, formatted), kwargs), "")

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like `complete`, token by token."""
        return _each(_completion, self._stream(partial(self._text, prompt, formatted), kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like `complete`, without blocking the event loop; cancelling it stops the request in the engine."""
        [output] = await gather([partial(self._stream, partial(self._text, prompt, formatted), kwargs)])
        return _completion(output, "")

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False,
                               **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like `stream_complete`, without blocking the event loop; leaving it stops the request in the engine."""
        return _aeach(_completion, partial(self._stream, partial(self._text, prompt, formatted), kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers a conversation, in the model's own chat template."""
        return _chat(self._generate(self._conversation(messages), kwargs), "")

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like `chat`, token by token."""
        return _each(_chat, self._stream(partial(self._conversation, messages), kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like `chat`, without blocking the event loop; cancelling it stops the request in the engine."""
        [output] = await gather([partial(self._stream, partial(self._conversation, messages), kwargs)])
        return _chat(output, "")

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Like `stream_chat`, without blocking the event loop; leaving it stops the request in the engine."""
        return _aeach(_chat, partial(self._stream, partial(self._conversation, messages), kwargs))

    def _text(self, prompt: str, formatted: bool) -> BlendPrompt:
        assert self.completion_to_prompt is not None
        text = prompt if formatted else self.completion_to_prompt(prompt)
        return BlendPrompt.from_text(text, self.config.delimiter, keep_delimiter=self.config.keep_delimiter)

    def _conversation(self, messages: Sequence[ChatMessage]) -> BlendPrompt:
        for message in messages:
            if not all(isinstance(block, TextBlock) for block in message.blocks):
                raise PromptError("the model reads text only: leave images, audio and files out of the messages")
        rows = [{"role": message.role.value, "content": message.content or ""} for message in messages]
        text = render_chat(self.engine.tokenizer, rows, self.chat_template, **self.chat_template_kwargs)
        return BlendPrompt.from_text(text, self.config.delimiter, keep_delimiter=self.config.keep_delimiter,
                                     add_special_tokens=False)

    def _call(self, arguments: dict[str, Any]) -> Call:
        defaults = {"temperature": self.temperature, "max_tokens": self.max_tokens} | self.sampling_args
        return split_arguments(defaults, arguments)

    def _generate(self, prompt: BlendPrompt, arguments: dict[str, Any]) -> BlendOutput:
        call = self._call(arguments)
        return self.engine.generate([prompt], call.params, **call.options)[0]

    def _stream(self, prompt: Callable[[], BlendPrompt],
                arguments: dict[str, Any]) -> Generator[BlendOutput, None, None]:
        """Builds the prompt only once it runs, in the thread that may wait for the engine."""
        call = self._call(arguments)
        yield from self.engine.stream(prompt(), call.params, **call.options)


def _raw(output: BlendOutput) -> dict[str, Any] | None:
    if not output.finished:
        return None
    return {"finish_reason": output.finish_reason, "usage": usage_of([output]), "blend": output.stats.to_dict()}


def _completion(output: BlendOutput, said: str) -> CompletionResponse:
    return CompletionResponse(text=output.text, delta=output.text[len(said):], raw=_raw(output))


def _chat(output: BlendOutput, said: str) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=output.text)
    return ChatResponse(message=message, delta=output.text[len(said):], raw=_raw(output))


def _each(respond: Callable[[BlendOutput, str], R], outputs: Generator[BlendOutput, None, None]
          ) -> Generator[R, None, None]:
    said = ""
    with closing(outputs):
        for output in outputs:
            yield respond(output, said)
            said = output.text


async def _aeach(respond: Callable[[BlendOutput, str], R], start: Callable[[], Generator[BlendOutput, None, None]]
                 ) -> AsyncGenerator[R, None]:
    said = ""
    async with aclosing(iterate(start)) as outputs:
        async for output in outputs:
            yield respond(output, said)
            said = output.text
