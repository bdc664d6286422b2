"""`BlendLLM`: a text completion model that reuses the KV cache of the documents in its prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from blendrag import BlendOutput, BlendPrompt
from blendrag.adapters import chat_prompt, gather, has_chat_template, iterate, usage_of
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.runnables import RunnableConfig

from langchain_blendrag._messages import artifact_texts, openai_messages
from langchain_blendrag._results import generation_info, logprobs_info
from langchain_blendrag._settings import EngineSettings

logger = logging.getLogger(__name__)

_arguments: ContextVar[Mapping[str, Any]] = ContextVar("arguments")
"""Arguments of the call that runs: LangChain leaves them out of its cache's key unless they identify the model."""


class BlendLLM(EngineSettings, BaseLLM):
    """A completion model on vLLM that reuses the stored KV of document chunks at any place in a prompt.

    Chunks are what `format_documents` marked in the prompt; each is reused where the store has it, and computed where
    it has not.  A batch is one engine call.

    Example:
        >>> from langchain_blendrag import BlendLLM, format_documents
        >>> llm = BlendLLM(model="Qwen/Qwen3-8B", temperature=0, config={"store_path": "~/kv"})
        >>> chain = {"context": retriever | format_documents, "question": RunnablePassthrough()} | prompt | llm
        >>> chain.invoke("Where is Paris?")
        'Paris is the capital of France.'

    Text is completed as it is.  Messages, such as a `ChatPromptTemplate` makes, go through the model's chat template
    where it has one; `chat_template=None` turns that off.  (The log says so at level INFO when it happens first.)

    A call takes any sampling parameter of vLLM's, and `blend=False`, `policy`, `ratio` and the policy's own settings:
    `llm.invoke(text, policy="full", max_tokens=20)`.
    """

    chat_template: str | None = "auto"
    """For messages: "auto" is the model's own template, None is LangChain's plain "Human: ..." text; or a template."""

    @property
    def _llm_type(self) -> str:
        return "blendrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity() | {"chat_template": self.chat_template} | {"call": dict(_arguments.get({}))}

    def to_prompt(self, model_input: LanguageModelInput) -> BlendPrompt:
        """The prompt that this input becomes; its `prefix` is what chunks are best encoded behind."""
        return self._prompt(self._templated(self._convert_input(model_input)).to_string())

    def _templated(self, value: PromptValue) -> PromptValue:
        """Messages with the chat template applied; anything else as it is."""
        if not isinstance(value, ChatPromptValue):
            return value
        template, messages = self.chat_template, value.to_messages()
        if template is None or (template == "auto" and not has_chat_template(self.engine.tokenizer)):
            return ChatPromptValue(messages=list(map(self._paired, messages)))
        if template == "auto":
            _tell_once(self.model)
        prompt = chat_prompt(self.engine.tokenizer, openai_messages(messages), self.config,
                             None if template == "auto" else template, documents=artifact_texts(messages))
        return _RenderedPrompt(messages=messages, text=_RenderedText(prompt.to_text()))

    def _paired(self, message: BaseMessage) -> BaseMessage:
        """The message with its marks as pairs, which are no others' where several messages become one text."""
        if not isinstance(message.content, str):
            return message
        return message.model_copy(update={"content": self._cut(message.content, rendered=False).to_text()})

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """Applies the chat template to prompts that are messages, and completes all prompts in one engine call."""
        return super().generate_prompt([self._templated(prompt) for prompt in prompts], *args, **kwargs)

    async def agenerate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """The same without blocking the event loop, not even while the model loads."""
        rendered = await asyncio.to_thread(lambda: [self._templated(prompt) for prompt in prompts])
        return await super().agenerate_prompt(rendered, *args, **kwargs)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Completes prompts in one engine call."""
        token = _arguments.set(_of_model(kwargs))
        try:
            return super().generate(prompts, *args, **kwargs)
        finally:
            _arguments.reset(token)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Completes prompts; they share batches in the engine."""
        token = _arguments.set(_of_model(kwargs))
        try:
            return await super().agenerate(prompts, *args, **kwargs)
        finally:
            _arguments.reset(token)

    def stream(self, input: LanguageModelInput, config: RunnableConfig | None = None,  # noqa: A002
               **kwargs: Any) -> Iterator[str]:
        """The answer, piece by piece."""
        yield from super().stream(self._templated(self._convert_input(input)), config, **kwargs)

    async def astream(self, input: LanguageModelInput, config: RunnableConfig | None = None,  # noqa: A002
                      **kwargs: Any) -> AsyncIterator[str]:
        """The answer, piece by piece, without blocking the event loop."""
        value = await asyncio.to_thread(lambda: self._templated(self._convert_input(input)))
        async for piece in super().astream(value, config, **kwargs):
            yield piece

    def _prompt(self, text: str) -> BlendPrompt:
        # A cache or a callback may hand on a plain copy of the text: never put a second BOS in front of it.
        bos = self.engine.tokenizer.bos_token if self.engine.tokens.leading_ids else None
        return self._cut(text, rendered=isinstance(text, _RenderedText) or bool(bos and text.startswith(bos)))

    def _outputs(self, prompt: str, stop: list[str] | None,
                 arguments: dict[str, Any]) -> Generator[BlendOutput, None, None]:
        call = self._call(arguments, stop)
        yield from self.engine.stream(self._prompt(prompt), call.params, **call.options)

    def _generate(self, prompts: list[str], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> LLMResult:
        call = self._call(kwargs, stop)
        return self._result(self.engine.generate(list(map(self._prompt, prompts)), call.params, **call.options))

    async def _agenerate(self, prompts: list[str], stop: list[str] | None = None,
                         run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any) -> LLMResult:
        return self._result(await gather([partial(self._outputs, prompt, stop, kwargs) for prompt in prompts]))

    def _stream(self, prompt: str, stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[GenerationChunk]:
        chunk_of = _Chunks()
        with closing(self._outputs(prompt, stop, kwargs | {"n": 1})) as outputs:
            for output in outputs:
                chunk = chunk_of(output)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(self, prompt: str, stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[GenerationChunk]:
        chunk_of = _Chunks()
        async with aclosing(iterate(lambda: self._outputs(prompt, stop, kwargs | {"n": 1}))) as outputs:
            async for output in outputs:
                chunk = chunk_of(output)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _result(self, outputs: Sequence[BlendOutput]) -> LLMResult:
        generations = [
            [Generation(text=candidate.text,
                        generation_info=generation_info(output, number) | logprobs_info(output, number))
             for number, candidate in enumerate(output.outputs)]
            for output in outputs
        ]
        return LLMResult(generations=generations,
                         llm_output={"token_usage": usage_of(outputs), "model_name": self.model})


class _RenderedText(str):
    """Prompt text that a chat template made: it has its special tokens already."""

    __slots__ = ()


class _RenderedPrompt(PromptValue):
    """Messages, and the text that the chat template made of them."""

    messages: list[BaseMessage]
    text: Any
    """A `_RenderedText`; pydantic would make a plain `str` of it."""

    def to_string(self) -> str:
        return self.text  # type: ignore[no-any-return]

    def to_messages(self) -> list[BaseMessage]:
        return list(self.messages)


def _of_model(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call that reach the model, without those that only name or tag the run."""
    of_run = {"callbacks", "tags", "metadata", "run_name", "run_id"}
    return {name: value for name, value in arguments.items() if name not in of_run}


class _Chunks:
    """Turns the cumulative outputs of one streamed answer into what each of them adds."""

    def __init__(self) -> None:
        self._text = 0
        self._tokens = 0

    def __call__(self, output: BlendOutput) -> GenerationChunk:
        """What is new; the last chunk carries the token counts and the statistics."""
        text, info = output.text[self._text:], logprobs_info(output, start=self._tokens)
        self._text, self._tokens = len(output.text), len(output.token_ids)
        if output.finished:
            info |= generation_info(output) | {"token_usage": usage_of([output])}
        return GenerationChunk(text=text, generation_info=info or None)


@cache
def _tell_once(model: str) -> None:
    logger.info("BlendLLM puts messages through the chat template of %s; BlendLLM(chat_template=None) sends them as "
                'plain "Human: ..." text', model)
