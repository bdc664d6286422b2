"""Haystack's chat generators as subjects."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from pydantic import BaseModel

from tests.comparison.subject import Answer, Subject


def now(local: bool) -> str:
    """The time, here or in UTC."""
    return str(local)


class _Left(Exception):  # noqa: N818  # not an error
    pass


class HaystackGenerator(Subject):
    """A component that answers chats.  A stream is left by a callback that raises."""

    def ask(self, prompt: str, **options: Any) -> Answer:
        replies = self.model.run([ChatMessage.from_user(prompt)], generation_kwargs=self.column.translate(options))
        return _answer(replies["replies"])

    async def aask(self, prompt: str, **options: Any) -> Answer:
        replies = await self.model.run_async([ChatMessage.from_user(prompt)],
                                             generation_kwargs=self.column.translate(options))
        return _answer(replies["replies"])

    def stream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        pieces: list[Answer] = []

        def take(chunk: StreamingChunk) -> None:
            pieces.append(_piece(chunk))
            if len(pieces) == leave_after:
                raise _Left

        with suppress(_Left):
            self.model.run([ChatMessage.from_user(prompt)], take, self.column.translate(options))
        return pieces

    async def astream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        pieces: list[Answer] = []

        async def take(chunk: StreamingChunk) -> None:
            pieces.append(_piece(chunk))
            if len(pieces) == leave_after:
                raise _Left

        with suppress(_Left):
            await self.model.run_async([ChatMessage.from_user(prompt)], take, self.column.translate(options))
        return pieces

    def converse(self, system: str, user: str, **options: Any) -> Answer:
        messages = [ChatMessage.from_system(system), ChatMessage.from_user(user)]
        return _answer(self.model.run(messages, generation_kwargs=self.column.translate(options))["replies"])

    def call_tools(self, prompt: str, tool_choice: str, **options: Any) -> Answer:
        named = "auto" if tool_choice == "auto" else {"type": "function", "function": {"name": tool_choice}}
        arguments = self.column.translate(options | self.column.tools.get("options", {})) | {"tool_choice": named}
        before = {name: getattr(self.model, name) for name in self.column.tools.get("fields", {})}
        vars(self.model).update(self.column.tools.get("fields", {}))
        try:
            return _answer(self.model.run([ChatMessage.from_user(prompt)], generation_kwargs=arguments,
                                          tools=[create_tool_from_function(now)])["replies"])
        finally:
            vars(self.model).update(before)

    def structured(self, schema: type[BaseModel], prompt: str) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema.model_json_schema()}}
        replies = self.model.run([ChatMessage.from_user(prompt)], generation_kwargs={"response_format": form})
        return schema.model_validate_json(replies["replies"][0].text)

    def reloaded(self) -> Any:
        return self.column.kind.from_dict(json.loads(json.dumps(self.model.to_dict())))  # type: ignore[attr-defined]

    def settings(self, model: Any) -> Any:
        return model.to_dict()


def _answer(replies: list[ChatMessage]) -> Answer:
    meta = replies[0].meta
    usage = meta.get("usage") or None
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else details.cached_tokens
    logprobs = meta.get("logprobs") or {}
    return Answer([reply.text or "" for reply in replies], meta.get("finish_reason"), meta.get("stop_reason"),
                  usage and (usage["prompt_tokens"], usage["completion_tokens"]), cached,
                  len(logprobs.get("content") or ()),
                  [(call.tool_name, call.arguments) for call in replies[0].tool_calls])


def _piece(chunk: StreamingChunk) -> Answer:
    usage = chunk.meta.get("usage")
    return Answer([chunk.content], usage=usage and (usage["prompt_tokens"], usage["completion_tokens"]))
