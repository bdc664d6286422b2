"""`ChatBlend.with_structured_output`."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal

from blendrag.errors import ConfigError
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import (
    BaseLLMOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

Method = Literal["json_schema", "function_calling", "json_mode"]
Schema = Mapping[str, Any] | type


def structured(model: BaseChatModel, schema: Schema | None, method: Method, include_raw: bool,
               strict: bool | None, **kwargs: Any) -> Runnable[LanguageModelInput, Any]:
    """The model, held to a form, and a parser of its answers.

    Raises:
        ConfigError: an unknown method, or no schema for a method that needs one.
    """
    if schema is None and method != "json_mode":
        raise ConfigError(f"the method {method!r} needs a schema: pass one, or method=\"json_mode\" for any JSON")
    wanted: Any = dict(schema) if isinstance(schema, Mapping) else schema
    if isinstance(wanted, dict) and isinstance(inner := wanted.get("schema"), Mapping):
        wanted = {"title": wanted.get("name", "answer")} | dict(inner)  # OpenAI's {"name": ..., "schema": ...}
    told: dict[str, Any] = {"ls_structured_output_format": {
        "kwargs": {"method": method, "strict": strict}, "schema": wanted or {"title": "object", "type": "object"}}}
    parser: BaseLLMOutputParser[Any]
    if method == "function_calling":
        tool = convert_to_openai_tool(wanted, strict=strict)
        name = tool["function"]["name"]
        held = model.bind_tools([tool], tool_choice=name, **told, **kwargs)
        parser = (PydanticToolsParser(tools=[wanted], first_tool_only=True) if _is_model(wanted)
                  else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True))
    else:
        held = model.bind(response_format=_response_format(method, wanted, strict), **told, **kwargs)
        parser = PydanticOutputParser(pydantic_object=wanted) if _is_model(wanted) else JsonOutputParser()
    if not include_raw:
        return held | parser
    parsed: Any = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    safe = parsed.with_fallbacks([failed], exception_key="parsing_error")
    both: Runnable[LanguageModelInput, Any] = RunnableParallel(raw=held) | safe
    return both


def _response_format(method: str, schema: Any, strict: bool | None) -> dict[str, Any]:
    if method == "json_mode":
        return {"type": "json_object"}
    if method != "json_schema":
        raise ConfigError(f"there is no method {method!r}: use json_schema, function_calling or json_mode")
    form = convert_to_json_schema(schema, strict=strict)
    return {"type": "json_schema", "json_schema": {"name": form.get("title", "answer"), "schema": form}}


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)
