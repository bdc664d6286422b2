"""Documents in conversations: the text is the template's own, and chunks are exactly the documents."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from blendrag import BlendConfig, BlendPrompt, Chunk, mark_chunks
from blendrag.adapters import chat_prompt, render_chat
from blendrag.errors import PromptError
from blendrag.pairs import CLOSE, OPEN
from blendrag.tokens import SegmentTokenizer
from tests.conversations import TEMPLATES, Message, check_chunks, conversations

PASSAGES = ["Arlon lies on the river Semois.", "Basel lies on the river Rhine.\n", "\n  Dresden lies on the Elbe. "]
CHATML = TEMPLATES["chatml"]
SEGMENTS = cache(SegmentTokenizer)
many = partial(settings, deadline=None,
               suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def rendered(tokenizer: Any, rows: Any, template: str = CHATML, **variables: Any) -> str:
    """What transformers makes of the messages."""
    return str(tokenizer.apply_chat_template(rows, chat_template=template, tokenize=False, add_generation_prompt=True,
                                             **variables))


def decoded(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text)))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# Any conversation.


@many(max_examples=150)
@given(conversations, st.sampled_from(sorted(TEMPLATES)))
@example([Message("system", ["", "\n"], ["a\n"], False), Message("user", ["", ""], ["a\n"], False)], "gemma")
def test_the_text_is_the_templates_and_the_chunks_are_the_documents(tokenizer: Any, conversation: list[Message],
                                                                    name: str) -> None:
    prompt = chat_prompt(tokenizer, [{"role": message.role, "content": message.marked} for message in conversation],
                         template=TEMPLATES[name])
    plain = [{"role": message.role, "content": message.plain} for message in conversation]
    assert prompt.text == rendered(tokenizer, plain, TEMPLATES[name])
    check_chunks(prompt.chunks, conversation, name)
    assert not prompt.add_special_tokens


@many(max_examples=50)
@given(conversations, st.sampled_from(sorted(TEMPLATES)))
def test_text_in_which_nothing_is_marked_is_sent_as_it_is(tokenizer: Any, conversation: list[Message],
                                                          name: str) -> None:
    rows = [{"role": message.role, "content": "".join(message.texts[:1])} for message in conversation]
    assert chat_prompt(tokenizer, rows, template=TEMPLATES[name]).parts == (rendered(tokenizer, rows, TEMPLATES[name]),)


@many(max_examples=25)
@given(conversations)
def test_the_model_is_sent_the_tokens_of_that_text(tokenizer: Any, conversation: list[Message]) -> None:
    prompt = chat_prompt(tokenizer, [{"role": message.role, "content": message.marked} for message in conversation],
                         template=CHATML)
    assume(decoded(tokenizer, prompt.text) == prompt.text)  # the model has no tokens for some bytes
    tokens = SEGMENTS(tokenizer)(prompt)
    assert tokenizer.decode(tokens.ids) == prompt.text
    for (start, end), chunk in zip(tokens.spans, prompt.chunks, strict=True):
        assert tokenizer.decode(tokens.ids[start:end]) == chunk
        assert not set(tokenizer.all_special_ids) & set(tokens.ids[start:end])


@many(max_examples=50)
@given(conversations)
def test_a_rendered_prompt_is_one_string_and_back(tokenizer: Any, conversation: list[Message]) -> None:
    prompt = chat_prompt(tokenizer, [{"role": message.role, "content": message.marked} for message in conversation],
                         template=CHATML)
    assert BlendPrompt.from_text(prompt.to_text(), add_special_tokens=False) == prompt


# Where documents stand.


def test_what_stands_between_the_documents_of_two_messages_is_no_chunk(tokenizer: Any) -> None:
    rows = [{"role": "system", "content": f"Answer from these.\n{mark_chunks(PASSAGES[:1])}"},
            {"role": "user", "content": "Where is Arlon?"}, {"role": "assistant", "content": "On the Semois."},
            {"role": "user", "content": f"{mark_chunks(PASSAGES[1:])}\nAnd Basel?"}]
    prompt = chat_prompt(tokenizer, rows, template=CHATML)
    assert prompt.chunks == PASSAGES
    assert prompt.prefix == "<|im_start|>system\nAnswer from these.\n"
    assert prompt.parts[2] == ("<|im_end|>\n<|im_start|>user\nWhere is Arlon?<|im_end|>\n<|im_start|>assistant\n"
                               "On the Semois.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("delimiter", ["\ue000", " # # "])
def test_a_delimiter_marks_within_a_message(tokenizer: Any, delimiter: str) -> None:
    config = BlendConfig(delimiter=delimiter)
    rows = [{"role": "user", "content": f"{mark_chunks(PASSAGES[:1], delimiter)}Where?"},
            {"role": "user", "content": f"And{delimiter}there?"},
            {"role": "user", "content": mark_chunks(PASSAGES[1:], delimiter)}]
    prompt = chat_prompt(tokenizer, rows, config, CHATML)
    assert prompt.chunks == PASSAGES
    assert prompt.text == rendered(tokenizer, [{"role": "user", "content": text} for text in (
        f"{PASSAGES[0]}Where?", "Andthere?", "\n\n".join(PASSAGES[1:]))])
    kept = chat_prompt(tokenizer, rows, BlendConfig(delimiter=delimiter, keep_delimiter=True), CHATML)
    assert kept.text == rendered(tokenizer, rows)
    assert kept.chunks == PASSAGES


def test_parts_of_text_become_lines_of_one(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": mark_chunks(PASSAGES[:2])}, {"type": "text", "text": "Where?"}]
    prompt = chat_prompt(tokenizer, user(parts), template=CHATML)
    assert prompt.text == rendered(tokenizer, user(f"{PASSAGES[0]}\n\n{PASSAGES[1]}\nWhere?"))
    assert prompt.chunks == PASSAGES[:2]


@pytest.mark.parametrize("arguments", [{"notes": mark_chunks(PASSAGES[:1])}, mark_chunks(PASSAGES[:1])])
def test_documents_in_the_arguments_of_a_call(tokenizer: Any, arguments: Any) -> None:
    template = (CHATML + "{% for message in messages %}{% for call in message.tool_calls %}"
                "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}")
    call = {"type": "function", "function": {"name": "note", "arguments": arguments}}
    prompt = chat_prompt(tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}], template=template)
    assert prompt.chunks == PASSAGES[:1]
    assert OPEN not in prompt.text
    assert prompt.text.endswith('{"notes": "Arlon lies on the river Semois."}' if isinstance(arguments, dict)
                                else '"Arlon lies on the river Semois."')


def test_documents_that_are_named_are_found_in_messages_and_not_in_the_templates_own_text(tokenizer: Any) -> None:
    own = "A river, <|im_end|> for instance."
    prompt = chat_prompt(tokenizer, user(f"It says: {own}"), template=own + "{{ messages[0].content }}",
                         documents=[own, PASSAGES[0]])
    assert prompt.parts == (f"{own}It says: ", Chunk(own))


def test_a_named_document_is_data_however_short_it_is(tokenizer: Any) -> None:
    prompt = chat_prompt(tokenizer, user("Is it <|im_end|> or a <b>?"), BlendConfig(), CHATML,
                         documents=["<|im_end|>", "a <b>"])
    assert prompt.chunks == ["<|im_end|>"]


def test_documents_that_a_template_reads_as_a_variable(tokenizer: Any) -> None:
    template = "{% for document in documents %}{{ document.text }}\n{% endfor %}{{ messages[0].content }}"
    shown = {"documents": [{"title": "a", "text": PASSAGES[0]}, {"title": "b", "text": mark_chunks(PASSAGES[1:2])}]}
    prompt = chat_prompt(tokenizer, user("Who?"), template=template, documents=PASSAGES[:1], variables=shown)
    assert prompt.parts == (Chunk(PASSAGES[0]), "\n", Chunk(PASSAGES[1]), "\nWho?")


def test_a_message_that_is_shown_twice_has_its_documents_twice(tokenizer: Any) -> None:
    prompt = chat_prompt(tokenizer, user(mark_chunks(PASSAGES[:2])), template=CHATML + CHATML)
    assert prompt.chunks == PASSAGES[:2] * 2


def test_a_message_that_is_left_out_leaves_its_documents_out(tokenizer: Any) -> None:
    rows = [{"role": "user", "content": f"{mark_chunks(['</think> <|im_end|>', PASSAGES[0]])}</think>"},
            *user(mark_chunks(PASSAGES[1:2]))]
    prompt = chat_prompt(tokenizer, rows, template="{{ messages[1].content }}")
    assert prompt.parts == (Chunk(PASSAGES[1]),)


# Templates that look at the text.

SHOUTING = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
MEASURING = "{% for message in messages %}{{ message.content | length }}: {{ message.content }}\n{% endfor %}"


def test_documents_are_searched_where_sentinels_change_the_text(tokenizer: Any) -> None:
    prompt = chat_prompt(tokenizer, user(f"{mark_chunks(PASSAGES[:2])}Who?"), template=MEASURING)
    text = f"{PASSAGES[0]}\n\n{PASSAGES[1]}Who?"
    assert prompt.text == f"{len(text)}: {text}\n"
    assert prompt.chunks == PASSAGES[:2]


def test_a_document_that_is_told_from_other_text_by_nothing_is_text(tokenizer: Any) -> None:
    rows = [*user("Basel? Basel!"), *user(mark_chunks(["Basel", PASSAGES[0]]))]
    assert chat_prompt(tokenizer, rows, template=MEASURING).chunks == PASSAGES[:1]


def test_a_document_that_is_changed_is_text_unless_it_spells_a_control_token(tokenizer: Any) -> None:
    template = "{% for message in messages %}{{ message.content | replace('river', 'lake') | length }}{% endfor %}"
    prompt = chat_prompt(tokenizer, user(mark_chunks(PASSAGES[:1])), template=template)
    assert prompt.parts == (str(len(PASSAGES[0]) - 1),)
    with pytest.raises(PromptError, match=r"control token '<\|im_end\|>'.*take it out"):
        chat_prompt(tokenizer, user(mark_chunks(["A river <|im_end|>."])), template=template)


def test_a_document_of_which_a_part_is_shown_must_spell_no_control_token(tokenizer: Any) -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}"
    assert chat_prompt(tokenizer, user(mark_chunks(["so </think> it is"])), template=template).parts == (" it is",)
    with pytest.raises(PromptError, match="control token"):
        chat_prompt(tokenizer, user(mark_chunks(["so </think> it is <|im_end|>"])), template=template)


def test_what_is_shouted_is_still_found(tokenizer: Any) -> None:
    prompt = chat_prompt(tokenizer, user(f"{mark_chunks(PASSAGES[:1])} Who?"), template=SHOUTING)
    assert prompt.parts == (Chunk(PASSAGES[0].upper()), " WHO?")


def test_malformed_marks_reach_the_template(tokenizer: Any) -> None:
    rows = [*user(f"{OPEN}a"), *user(f"b{CLOSE}")]
    assert chat_prompt(tokenizer, rows, template=CHATML).parts == (rendered(tokenizer, rows),)
    assert render_chat(tokenizer, rows, CHATML) == rendered(tokenizer, rows)
