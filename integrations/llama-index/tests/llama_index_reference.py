"""What the engine was sent, what LlamaIndex alone would send, and the events it emits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.stats import BlendStats
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import CustomLLM


@dataclass
class Exchange:
    """A request that the engine answered: the prompt decoded from its token ids, and the answer."""

    prompt: str
    answer: str
    stats: BlendStats


class PlainLLM(CustomLLM):
    """LlamaIndex's idea of a chat model with a window in which everything fits; it gives answers from a list.

    Attributes:
        sent: the text of every prompt; that of chats in the model's template.
    """

    sent: list[str] = []  # noqa: RUF012 pydantic copies it
    _tokenizer: Any = PrivateAttr()
    _answers: Iterator[str] = PrivateAttr()

    def __init__(self, tokenizer: Any, answers: Sequence[str]) -> None:
        super().__init__()
        self._tokenizer, self._answers = tokenizer, iter(answers)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=10**6, num_output=8, is_chat_model=True, model_name="plain")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.sent.append(prompt)
        return CompletionResponse(text=next(self._answers))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        rows = [{"role": message.role.value, "content": message.content} for message in messages]
        self.sent.append(self._tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True))
        return ChatResponse(message=ChatMessage(role="assistant", content=next(self._answers)))


class Recorder(BaseEventHandler):
    """Keeps every event."""

    seen: list[Any] = []  # noqa: RUF012 pydantic copies it

    def handle(self, event: Any, **_: Any) -> None:
        self.seen.append(event)

    def responses(self, kind: type) -> list[Any]:
        """The responses in events of a kind."""
        return [event.response for event in self.seen if type(event) is kind]
