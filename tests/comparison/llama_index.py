"""LlamaIndex's models as subjects."""

from __future__ import annotations

import json
from contextlib import aclosing, closing
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from tests.comparison.subject import Answer, NotApplicable, Subject


def now(local: bool) -> str:
    """The time, here or in UTC."""
    return str(local)


class LlamaIndexLLM(Subject):
    """An `LLM`, used through its chat methods."""

    def ask(self, prompt: str, **options: Any) -> Answer:
        if "n" in options:
            raise NotApplicable  # a ChatResponse holds one message
        return _answer(self.model.chat([ChatMessage(prompt)], **self.column.translate(options)))

    async def aask(self, prompt: str, **options: Any) -> Answer:
        return _answer(await self.model.achat([ChatMessage(prompt)], **self.column.translate(options)))

    def stream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        pieces = []
        with closing(self.model.stream_chat([ChatMessage(prompt)], **self.column.translate(options))) as stream:
            for piece in stream:
                pieces.append(_answer(piece, piece.delta or ""))
                if len(pieces) == leave_after:
                    break
        return pieces

    async def astream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        pieces = []
        made = await self.model.astream_chat([ChatMessage(prompt)], **self.column.translate(options))
        async with aclosing(made) as stream:
            async for piece in stream:
                pieces.append(_answer(piece, piece.delta or ""))
                if len(pieces) == leave_after:
                    break
        return pieces

    def converse(self, system: str, user: str, **options: Any) -> Answer:
        messages = [ChatMessage(system, role="system"), ChatMessage(user)]
        return _answer(self.model.chat(messages, **self.column.translate(options)))

    def call_tools(self, prompt: str, tool_choice: str, **options: Any) -> Answer:
        model = self.model.model_copy(update=self.column.tools.get("fields", {}))
        response = model.chat_with_tools([FunctionTool.from_defaults(now)], prompt, tool_choice=tool_choice,
                                         **self.column.translate(options))
        calls = model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        answer = _answer(response)
        answer.calls = [(call.tool_name, call.tool_kwargs) for call in calls]
        return answer

    def structured(self, schema: type[BaseModel], prompt: str) -> Any:
        return self.model.structured_predict(schema, PromptTemplate(prompt))

    def reloaded(self) -> Any:
        return self.column.kind.from_dict(json.loads(json.dumps(self.model.to_dict())))  # type: ignore[attr-defined]

    def settings(self, model: Any) -> Any:
        return model.to_dict()

    def context_window(self) -> int | None:
        return int(self.model.metadata.context_window)


def _answer(response: ChatResponse, text: str | None = None) -> Answer:
    raw = response.raw if isinstance(response.raw, dict) else {}
    usage = raw.get("usage")
    return Answer([response.message.content or "" if text is None else text], raw.get("finish_reason"),
                  raw.get("stop_reason"), usage and (usage["prompt_tokens"], usage["completion_tokens"]),
                  usage and (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
                  len(response.logprobs or ()))
