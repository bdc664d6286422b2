"""A chat turn: tools and documents in the prompt, tool calls in the answer, whole and in pieces."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from blendrag import BlendConfig, Chunk, mark_chunks, strip_marks
from blendrag.adapters import ChatTurn, Reply, render_chat
from blendrag.adapters.replies import ReplyDelta
from blendrag.adapters.syntax import tool_syntax
from blendrag.adapters.tools import NamedReader, RequiredReader, guided
from blendrag.errors import ConfigError, PromptError

SHOWING_TOOLS = """{% for tool in tools %}{{ tool | tojson }} as <tool_call>JSON</tool_call>
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}{{ call.function.arguments.place }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
ASKED = [{"role": "user", "content": "What is the weather in Arlon?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}
TIME = {"type": "function", "function": {"name": "time"}}
CALLING = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Arlon"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def turn_of(tokenizer: Any, messages: Any = ASKED, **options: Any) -> ChatTurn:
    options = {"tools": [WEATHER, TIME], "chat_template": SHOWING_TOOLS} | options
    return ChatTurn(tokenizer, BlendConfig(), messages, **options)


def in_pieces(tokenizer: Any, reader: Any, text: str) -> list[ReplyDelta]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [reader.feed(tokenizer.decode(ids[:end]), ids[:end], end == len(ids)) for end in range(1, len(ids) + 1)]


def joined(deltas: list[ReplyDelta]) -> Reply:
    return Reply.of(ReplyDelta("".join(delta.content for delta in deltas),
                               tuple(call for delta in deltas for call in delta.tool_calls)))


def read(reader: Any, text: str) -> Reply:
    return Reply.of(reader.feed(text, [], True))


def facts(reply: Reply) -> Any:
    return reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


def test_the_template_is_shown_the_tools(tokenizer: Any) -> None:
    turn = turn_of(tokenizer)
    rows = [WEATHER, TIME]
    assert turn.prompt.text == tokenizer.apply_chat_template(ASKED, chat_template=SHOWING_TOOLS, tools=rows,
                                                             tokenize=False, add_generation_prompt=True)
    assert turn.sampling == {"skip_special_tokens": False}


def test_earlier_calls_reach_the_template_as_objects(tokenizer: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Arlon"}'}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    assert "assistant\nArlon<|im_end|>" in turn_of(tokenizer, messages).prompt.text


@pytest.mark.parametrize("text", [CALLING, CALLING + CALLING.replace("Arlon", "Basel"), "No need. 3 < 4 <tool",
                                  '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'])
def test_a_stream_tells_the_same_as_the_whole(tokenizer: Any, text: str) -> None:
    whole = read(turn_of(tokenizer)._use.reader(), text)
    deltas = in_pieces(tokenizer, turn_of(tokenizer)._use.reader(), text)
    assert facts(joined(deltas)) == facts(whole)
    assert len([delta for delta in deltas if delta != ReplyDelta()]) > 1
    assert whole.content + "".join(call.name for call in whole.tool_calls)


def test_calls_are_told_apart_from_text(tokenizer: Any) -> None:
    reply = read(turn_of(tokenizer)._use.reader(), CALLING)
    assert facts(reply) == ("Let me see.\n", [("weather", '{"place": "Arlon"}')])
    assert reply.tool_calls[0].id


def test_what_xgrammar_cannot_express_is_left_to_vllm() -> None:
    odd = {"type": "object", "patternProperties": {"^a": {"type": "string"}}, "propertyNames": {"pattern": "^a"}}
    assert guided(odd).json == odd
    assert guided({"type": "number", "multipleOf": 3}).json is not None


@cache
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer))


def allows(tokenizer: Any, turn: ChatTurn, text: str) -> bool:
    """Whether the turn's grammar lets this be the whole answer."""
    matcher = GrammarMatcher(compiler(tokenizer).compile_grammar(turn.sampling["structured_outputs"].grammar))
    return matcher.accept_string(text) and matcher.is_completed()


def test_a_named_tool_has_its_arguments_guided(tokenizer: Any) -> None:
    turn = turn_of(tokenizer, tool_choice="weather")
    assert allows(tokenizer, turn, '{"place": "Arlon"}')
    assert not allows(tokenizer, turn, '{"town": "Arlon"}')
    reply = joined(in_pieces(tokenizer, NamedReader("weather"), '{"place": "Arlon"}'))
    assert facts(reply) == ("", [("weather", '{"place": "Arlon"}')])
    assert facts(read(NamedReader("time"), "{}")) == ("", [("time", "{}")])


def test_a_required_call_is_one_of_the_tools(tokenizer: Any) -> None:
    text = '[{"name": "weather", "arguments": {"place": "Arlon"}}, {"name": "time", "arguments": {}}]'
    assert allows(tokenizer, turn_of(tokenizer, tool_choice="required"), text)
    one = turn_of(tokenizer, tool_choice="required", parallel_tool_calls=False)
    assert not allows(tokenizer, one, text)
    assert allows(tokenizer, one, '[{"name": "time", "arguments": {}}]')
    assert not allows(tokenizer, one, '[{"name": "wether", "arguments": {}}]')
    assert not allows(tokenizer, one, "[]")
    expected = ("", [("weather", '{"place": "Arlon"}'), ("time", "{}")])
    assert facts(read(RequiredReader(), text)) == expected
    assert facts(joined(in_pieces(tokenizer, RequiredReader(), text))) == expected
    assert facts(read(RequiredReader(), text[:70])) == (text[53:70], expected[1][:1])


def test_definitions_of_a_schema_move_to_its_root(tokenizer: Any) -> None:
    parameters = {"$defs": {"Place": {"type": "string"}}, "type": "object",
                  "properties": {"p": {"$ref": "#/$defs/Place"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    turn = turn_of(tokenizer, tools=[tool], tool_choice="required")
    assert allows(tokenizer, turn, '[{"name": "go", "arguments": {"p": "Arlon"}}]')
    assert not allows(tokenizer, turn, '[{"name": "go", "arguments": {"p": 1}}]')
    assert "$defs" in parameters  # the caller's schema is left alone


def test_no_call_where_none_may_be(tokenizer: Any) -> None:
    turn = turn_of(tokenizer, tool_choice="none")
    assert facts(read(turn._use.reader(), CALLING)) == (CALLING, [])
    assert turn.sampling == {}


def test_documents_are_marked_wherever_they_stand(tokenizer: Any) -> None:
    passages = ["Arlon lies on the river Semois.", "Basel lies on the river Rhine."]
    messages = [{"role": "system", "content": mark_chunks([passages[0]])},
                {"role": "user", "content": f"{passages[1]}\n\n{passages[1]} And {passages[0]}"}]
    turn = turn_of(tokenizer, messages, tools=(), chat_template=None, documents=[*passages, "not there at all", "a"])
    assert turn.prompt.chunks == [passages[0], passages[1], passages[1], passages[0]]
    rows = [{**row, "content": strip_marks(row["content"])} for row in messages]
    assert turn.prompt.text == render_chat(tokenizer, rows)


def test_of_documents_that_overlap_the_longest_counts(tokenizer: Any) -> None:
    long = "Arlon lies on the river Semois. It has a cathedral."
    turn = turn_of(tokenizer, [{"role": "user", "content": long}], tools=(), chat_template=None,
                   documents=[long[:31], long])
    assert turn.prompt.parts[1] == Chunk(long)


@pytest.mark.parametrize(("form", "good", "bad"), [
    ({"type": "json_object"}, '{"a": [1, 2]}', "[1, 2]"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}, "[1, 2]", '{"a": [1, 2]}'),
])
def test_response_formats(tokenizer: Any, form: dict[str, Any], good: str, bad: str) -> None:
    turn = turn_of(tokenizer, tools=(), chat_template=None, response_format=form)
    assert allows(tokenizer, turn, good)
    assert not allows(tokenizer, turn, bad)
    assert not allows(tokenizer, turn, good.replace(", ", ",\n"))
    assert turn_of(tokenizer, response_format={"type": "text"}).sampling == {"skip_special_tokens": False}


@pytest.mark.parametrize(("options", "error", "remedy"), [
    ({"chat_template": None}, PromptError, "as chat_template"),
    ({"tool_choice": "wether"}, PromptError, r"\['time', 'weather'\]"),
    ({"tool_choice": "required", "tools": ()}, PromptError, "pass some"),
    ({"tool_parser": "hermes3"}, PromptError, "hermes"),
    ({"chat_template": "{{ tools }}"}, PromptError, "tool_parser"),
    ({"response_format": {"type": "xml"}}, ConfigError, "json_object"),
    ({"response_format": {"type": "json_object"}, "tool_choice": "time"}, ConfigError, "leave response_format out"),
])
def test_errors_name_the_remedy(tokenizer: Any, options: dict[str, Any], error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        turn_of(tokenizer, **options)


def test_a_template_that_cannot_do_without_tools_says_so(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="pass another template"):
        turn_of(tokenizer, tools=(), chat_template="{% for tool in tools %}{% endfor %}")


@pytest.mark.parametrize(("template", "syntax"), [
    ("<tool_call>", "hermes"), ("<tool_call><function=x>", "qwen3_coder"), ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"), ("functools[", "phi4_mini_json"),
])
def test_templates_tell_the_syntax(template: str, syntax: str) -> None:
    assert tool_syntax(template) == syntax


def test_vllm_knows_every_syntax() -> None:
    from blendrag.adapters.syntax import _SIGNS
    from blendrag.runtime.tool_parsing import parser_names

    assert {name for _, name in _SIGNS} <= set(parser_names())
