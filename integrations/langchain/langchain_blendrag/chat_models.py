"""`ChatBlend`: a chat model that reuses the KV cache of the documents in its messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from blendrag import BlendOutput, BlendPrompt
from blendrag.adapters import gather, iterate
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field

from langchain_blendrag._messages import chat_text
from langchain_blendrag._results import generation_info, response_metadata, usage_metadata
from langchain_blendrag._settings import EngineSettings


class ChatBlend(EngineSettings, BaseChatModel):
    """A chat model on vLLM that reuses the stored KV of document chunks at any place in a conversation.

    The model's own chat template is applied.  Chunks are what `format_documents` marked in the messages; each is
    reused where the store has it, and computed where it has not.

    Example:
        >>> from langchain_blendrag import ChatBlend, format_documents
        >>> model = ChatBlend(model="Qwen/Qwen3-8B", temperature=0, config={"store_path": "~/kv"})
        >>> answer = model.invoke([("system", "Answer from these passages.\\n" + format_documents(documents)),
        ...                        ("human", "Where is Paris?")])
        >>> answer.usage_metadata["input_token_details"]["cache_read"]
        1872

    A call takes any sampling parameter of vLLM's, and `blend=False`, `policy`, `ratio` and the policy's own settings:
    `model.invoke(messages, policy="full", max_tokens=20)`.
    """

    chat_template: str | None = None
    """A Jinja chat template to use in place of the model's."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the template, such as `{"enable_thinking": False}`."""

    streaming: bool = False
    """Let `invoke` stream within, so that callbacks see each token."""

    @property
    def _llm_type(self) -> str:
        return "blendrag-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity() | {"chat_template": self.chat_template,
                                   "chat_template_kwargs": self.chat_template_kwargs}

    def to_prompt(self, model_input: LanguageModelInput) -> BlendPrompt:
        """The prompt that this input becomes; its `prefix` is what chunks are best encoded behind."""
        return self._prompt(self._convert_input(model_input).to_messages())

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Length of the whole prompt, chat template included; the template is not given the tools."""
        return len(self.engine.tokens(self._prompt(messages)).ids)

    def _prompt(self, messages: Sequence[BaseMessage]) -> BlendPrompt:
        text = chat_text(self, messages, self.chat_template, self.chat_template_kwargs)
        return self._cut(text, rendered=True)

    def _outputs(self, messages: Sequence[BaseMessage], stop: list[str] | None,
                 arguments: dict[str, Any]) -> Generator[BlendOutput, None, None]:
        call = self._call(arguments, stop)
        yield from self.engine.stream(self._prompt(messages), call.params, **call.options)

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        call = self._call(kwargs, stop)
        return self._result(self.engine.generate([self._prompt(messages)], call.params, **call.options)[0])

    async def _agenerate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                         run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        return self._result((await gather([lambda: self._outputs(messages, stop, kwargs)]))[0])

    def _stream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        said = 0
        with closing(self._outputs(messages, stop, kwargs | {"n": 1})) as outputs:
            for output in outputs:
                chunk = self._chunk(output, said)
                said = len(output.text)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        said = 0
        async with aclosing(iterate(lambda: self._outputs(messages, stop, kwargs | {"n": 1}))) as outputs:
            async for output in outputs:
                chunk = self._chunk(output, said)
                said = len(output.text)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _result(self, output: BlendOutput) -> ChatResult:
        generations = [
            ChatGeneration(
                message=AIMessage(content=candidate.text, usage_metadata=usage_metadata(output),
                                  response_metadata=response_metadata(output, self.model, number)),
                generation_info=generation_info(output, number),
            )
            for number, candidate in enumerate(output.outputs)
        ]
        return ChatResult(generations=generations, llm_output={"model_name": self.model})

    def _chunk(self, output: BlendOutput, said: int) -> ChatGenerationChunk:
        """What is new in a cumulative output; the last one carries usage and statistics."""
        text = output.text[said:]
        if not output.finished:
            return ChatGenerationChunk(message=AIMessageChunk(content=text))
        last = AIMessageChunk(content=text, usage_metadata=usage_metadata(output), chunk_position="last",
                              response_metadata=response_metadata(output, self.model))
        return ChatGenerationChunk(message=last, generation_info=generation_info(output))
