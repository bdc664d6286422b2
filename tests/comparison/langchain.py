"""LangChain's models as subjects: each call is one that LangChain's users make."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pydantic import BaseModel

from tests.comparison.subject import Answer, NotApplicable, Subject


@tool
def now(local: bool) -> str:
    """The time, here or in UTC."""
    return str(local)


class _LangChain(Subject):
    """What chat and completion models have in common."""

    def value(self, prompt: str) -> Any:
        return ChatPromptValue(messages=[HumanMessage(prompt)])

    def call(self, options: dict[str, Any]) -> dict[str, Any]:
        return self.column.translate(options)

    def ask(self, prompt: str, **options: Any) -> Answer:
        return self.answer(self.model.generate_prompt([self.value(prompt)], **self.call(options)))

    async def aask(self, prompt: str, **options: Any) -> Answer:
        return self.answer(await self.model.agenerate_prompt([self.value(prompt)], **self.call(options)))

    def stream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        pieces, last = [], _Last()
        with closing(self.model.stream(self.value(prompt), {"callbacks": [last]}, **self.call(options))) as stream:
            for piece in stream:
                pieces.append(self.piece(piece))
                if len(pieces) == leave_after:
                    return pieces
        return [*pieces, *last.told(self)]

    async def astream(self, prompt: str, leave_after: int | None = None, **options: Any) -> list[Answer]:
        pieces, last = [], _Last()
        async with aclosing(self.model.astream(self.value(prompt), {"callbacks": [last]},
                                               **self.call(options))) as stream:
            async for piece in stream:
                pieces.append(self.piece(piece))
                if len(pieces) == leave_after:
                    return pieces
        return [*pieces, *last.told(self)]

    def batch(self, prompts: list[str], **options: Any) -> None:
        self.model.batch(list(map(self.value, prompts)), **self.call(options))

    def converse(self, system: str, user: str, **options: Any) -> Answer:
        chain = ChatPromptTemplate([("system", system), ("human", user)]) | self.model
        return self.piece(chain.invoke({}, **self.call(options)))

    def count_tokens(self, text: str) -> int:
        return int(self.model.get_num_tokens(text))

    def reloaded(self) -> Any:
        kind = self.column.kind
        return load(dumpd(self.model), valid_namespaces=[kind.__module__.split(".")[0]], allowed_objects=[kind],
                    secrets_map={"OPENAI_API_KEY": "none"})

    def settings(self, model: Any) -> Any:
        return dict(model._identifying_params)

    def has_response_cache(self) -> bool:
        return True

    def answer(self, result: LLMResult) -> Answer:
        """What a result tells."""
        raise NotImplementedError

    def piece(self, piece: Any) -> Answer:
        """What `invoke` returns, or a stream yields."""
        raise NotImplementedError


class _Last(BaseCallbackHandler):
    """The result that callbacks get at the end of a stream, where completion models put what a text cannot hold."""

    def __init__(self) -> None:
        self.result: LLMResult | None = None

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self.result = response

    def told(self, subject: _LangChain) -> Sequence[Answer]:
        if self.result is None or not isinstance(subject, LangChainLLM):
            return []
        end = subject.answer(self.result)
        end.texts = [""]
        return [end]


class LangChainChat(_LangChain):
    """A `BaseChatModel`."""

    def answer(self, result: LLMResult) -> Answer:
        first, *others = [self.piece(generation.message) for generation in result.generations[0]]  # type: ignore[union-attr]
        first.texts += [text for other in others for text in other.texts]
        return first

    def piece(self, piece: AIMessage) -> Answer:
        info = piece.response_metadata
        usage = piece.usage_metadata if "input_tokens" in (piece.usage_metadata or {}) else None  # none from a cache
        return Answer(
            [str(piece.text)], info.get("finish_reason"), info.get("stop_reason"),
            usage and (usage["input_tokens"], usage["output_tokens"]),
            usage and usage.get("input_token_details", {}).get("cache_read"),
            len((info.get("logprobs") or {}).get("content") or ()),
            [(call["name"], call["args"]) for call in piece.tool_calls])

    def call_tools(self, prompt: str, tool_choice: str, **options: Any) -> Answer:
        model = self.model.model_copy(update=self.column.tools.get("fields", {}))
        bound = model.bind_tools([now], tool_choice=tool_choice)
        arguments = self.call(options | self.column.tools.get("options", {}))
        return self.piece(bound.invoke([HumanMessage(prompt)], **arguments))

    def structured(self, schema: type[BaseModel], prompt: str) -> Any:
        return self.model.with_structured_output(schema, method="json_schema").invoke(prompt)

    def context_window(self) -> int | None:
        return (self.model.profile or {}).get("max_input_tokens")


class LangChainLLM(_LangChain):
    """A `BaseLLM`."""

    def value(self, prompt: str) -> Any:
        return StringPromptValue(text=prompt)

    def answer(self, result: LLMResult) -> Answer:
        told = (result.llm_output or {}).get("token_usage")
        info = result.generations[0][0].generation_info or {}
        usage = told or info.get("token_usage")
        return Answer(
            [generation.text for generation in result.generations[0]], info.get("finish_reason"),
            info.get("stop_reason"), usage and (usage["prompt_tokens"], usage["completion_tokens"]),
            usage and (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            len((info.get("logprobs") or {}).get("content") or ()))

    def piece(self, piece: str) -> Answer:
        return Answer([piece])

    def call_tools(self, prompt: str, tool_choice: str, **options: Any) -> Answer:
        raise NotApplicable

    def structured(self, schema: type[BaseModel], prompt: str) -> Any:
        from vllm.sampling_params import StructuredOutputsParams

        form = StructuredOutputsParams(json=schema.model_json_schema(), disable_any_whitespace=True)
        return schema.model_validate_json(self.model.invoke(prompt, structured_outputs=form, max_tokens=20))
