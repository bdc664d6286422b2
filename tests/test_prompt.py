"""A prompt knows its chunks: as parts, or as text in which a delimiter marks them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blendrag.config import DELIMITER
from blendrag.errors import PromptError
from blendrag.pairs import CLOSE, LITERAL, OPEN
from blendrag.prompt import BlendPrompt, Chunk, escape_marks, mark_chunks, strip_marks

ESCAPE = "\ue001"
DELIMITERS = [DELIMITER, " # # ", "##", "abab"]
FORMS = [None, *DELIMITERS]
"""Pairs of marks, and delimiters."""

# Any text, and text made to collide with the marks, the delimiters and the escapes.
MARKS = [OPEN, CLOSE, LITERAL, *OPEN, CLOSE[-1], LITERAL[-1]]
texts = (st.text() | st.text(alphabet=f"# ab{DELIMITER}{ESCAPE}0123\n", max_size=12)
         | st.lists(st.sampled_from([*MARKS, "a", " ", "\n"]), max_size=8).map("".join))
plain_texts = texts.map(lambda text: text.replace(ESCAPE, "e"))
separators = st.sampled_from(["\n\n", "\n", " ", "", "\n---\n", "#", "##", f"1{ESCAPE}", DELIMITER, OPEN, CLOSE])


# Parts.


def test_a_prompt_is_its_parts_in_order():
    prompt = BlendPrompt("Answer from these.\n", Chunk("Paris is ..."), "\n\n", Chunk("Rome is ..."), "\nWhere?")
    assert prompt.text == "Answer from these.\nParis is ...\n\nRome is ...\nWhere?"
    assert prompt.chunks == ["Paris is ...", "Rome is ..."]
    assert prompt.prefix == "Answer from these.\n"
    assert prompt.add_special_tokens


def test_empty_parts_are_left_out():
    assert BlendPrompt("", "a", Chunk(""), "").parts == ("a",)
    assert BlendPrompt().parts == ()
    assert BlendPrompt().text == BlendPrompt().prefix == ""


def test_the_prefix_is_everything_before_the_first_chunk():
    assert BlendPrompt("a", "b", Chunk("c"), "d").prefix == "ab"
    assert BlendPrompt(Chunk("c"), "d").prefix == ""
    assert BlendPrompt("a", "b").prefix == "ab"


def test_prompts_are_values():
    prompt = BlendPrompt("a", Chunk("b"))
    assert prompt == BlendPrompt("a", "", Chunk("b"))
    assert hash(prompt) == hash(BlendPrompt("a", Chunk("b")))
    assert prompt != BlendPrompt("a", "b")
    assert prompt != BlendPrompt("a", Chunk("b"), add_special_tokens=False)


@pytest.mark.parametrize("part", [None, 3, b"bytes", ["a list"], {"text": "a"}])
def test_parts_of_other_types_are_refused_with_the_remedy(part):
    with pytest.raises(PromptError, match=f"not {type(part).__name__}: wrap"):
        BlendPrompt("a", part)


@pytest.mark.parametrize("text", [None, 3, b"bytes", Chunk("a")])
def test_a_chunk_that_holds_no_text_is_refused(text):
    with pytest.raises(PromptError, match="str"):
        Chunk(text)


# Text with delimiters.


@pytest.mark.parametrize(("text", "parts"), [
    ("", ()),
    ("no chunk at all", ("no chunk at all",)),
    ("before|a|after", ("before", Chunk("a"), "after")),
    ("|a|", (Chunk("a"),)),
    ("before|after", ("before", "after")),
    ("before||after", ("before", "after")),
    ("before| \n\t|after", ("before", " \n\t", "after")),
    ("before|a|\n\n|b|after", ("before", Chunk("a"), "\n\n", Chunk("b"), "after")),
    ("before|a|b|after", ("before", Chunk("a"), Chunk("b"), "after")),
    ("| a |", (Chunk(" a "),)),
])
def test_what_lies_between_two_delimiters_is_a_chunk(text, parts):
    prompt = BlendPrompt.from_text(text, "|")
    assert prompt.text == "".join(part if isinstance(part, str) else part.text for part in parts)
    assert [part for part in prompt.parts if isinstance(part, Chunk)] == [p for p in parts if isinstance(p, Chunk)]
    assert prompt == BlendPrompt(*parts)


@settings(deadline=None)
@given(plain_texts, st.sampled_from(DELIMITERS))
def test_delimiters_are_taken_out_or_kept_as_asked(text, delimiter):
    assert BlendPrompt.from_text(text, delimiter).text == text.replace(delimiter, "")
    kept = BlendPrompt.from_text(text, delimiter, keep_delimiter=True)
    assert kept.text == text
    assert kept.chunks == BlendPrompt.from_text(text, delimiter).chunks


def test_special_tokens_are_left_out_on_request():
    assert not BlendPrompt.from_text("a", add_special_tokens=False).add_special_tokens


def test_an_empty_delimiter_is_refused():
    with pytest.raises(PromptError, match="delimiter"):
        BlendPrompt.from_text("a", "")
    with pytest.raises(PromptError, match="delimiter"):
        mark_chunks(["a"], "")


# Marked chunks.


@settings(deadline=None)
@given(texts, st.lists(texts, min_size=1, max_size=3), texts, st.sampled_from(FORMS))
def test_escaped_text_around_marked_chunks_is_no_chunk_whatever_it_holds(before, chunks, after, delimiter):
    marked = f"{escape_marks(before, delimiter)}{mark_chunks(chunks, delimiter)}{escape_marks(after, delimiter)}"
    prompt = BlendPrompt.from_text(marked, delimiter)
    assert prompt.chunks == [chunk for chunk in chunks if chunk.strip()]
    assert prompt.text == before + "\n\n".join(chunks) + after


@settings(deadline=None)
@given(st.lists(texts, max_size=4), st.sampled_from(FORMS), separators, st.booleans())
def test_marked_chunks_come_back_unchanged_whatever_they_hold(chunks, delimiter, separator, keep):
    marked = mark_chunks(chunks, delimiter, separator)
    prompt = BlendPrompt.from_text(f"Passages:\n{marked}\nQuestion?", delimiter, keep_delimiter=keep)
    assert prompt.chunks == [chunk for chunk in chunks if chunk.strip()]
    assert prompt.parts[0].startswith("Passages:\n")
    assert prompt.parts[-1].endswith("\nQuestion?")
    if not keep or delimiter is None:
        assert prompt.text == f"Passages:\n{separator.join(chunks)}\nQuestion?"


@settings(deadline=None)
@given(st.lists(texts, max_size=4), st.sampled_from(FORMS), separators)
def test_without_the_marks_the_text_is_the_joined_chunks(chunks, delimiter, separator):
    assert strip_marks(mark_chunks(chunks, delimiter, separator), delimiter) == separator.join(chunks)


@example(f"{ESCAPE}{DELIMITER}0", DELIMITER)
@settings(deadline=None)
@given(texts, st.sampled_from(FORMS))
def test_a_model_that_does_not_blend_is_sent_the_same_text(text, delimiter):
    assert strip_marks(text, delimiter) == BlendPrompt.from_text(text, delimiter).text


def test_nothing_to_mark_is_the_empty_text():
    assert mark_chunks([]) == ""
    assert mark_chunks(iter([])) == ""


def test_each_chunk_stands_between_an_opening_and_a_closing_mark():
    assert mark_chunks(["a", "b"]) == f"{OPEN}a{CLOSE}\n\n{OPEN}b{CLOSE}"


def test_chunks_stand_between_delimiters_where_one_is_configured():
    assert mark_chunks(["a", "b"], "##") == "##a##\n\n##b##"


@pytest.mark.parametrize(("text", "parts"), [
    (f"before{OPEN}a{CLOSE}after", ("before", Chunk("a"), "after")),
    (f"{OPEN}a{CLOSE}question{OPEN} b {CLOSE}", (Chunk("a"), "question", Chunk(" b "))),
    (f"before{OPEN} \n{CLOSE}{OPEN}{CLOSE}after", ("before \nafter",)),
    (f"{OPEN}a", (f"{OPEN}a",)),
    (f"a{CLOSE}b", (f"a{CLOSE}b",)),
    (f"{CLOSE}a{OPEN}", (f"{CLOSE}a{OPEN}",)),
    (f"{OPEN}a{OPEN}b{CLOSE}c{CLOSE}", (f"{OPEN}a", Chunk("b"), f"c{CLOSE}")),
    (f"{OPEN}{OPEN[:2]}{CLOSE[:1]}{CLOSE}", (Chunk(OPEN[:2] + CLOSE[:1]),)),
    (f"{OPEN[:2]}a{CLOSE[1:]}", (f"{OPEN[:2]}a{CLOSE[1:]}",)),
    (f"icons {DELIMITER} home {DELIMITER}", (f"icons {DELIMITER} home {DELIMITER}",)),
])
def test_a_document_is_an_opening_mark_and_the_next_closing_one_and_all_else_is_text(text, parts):
    assert BlendPrompt.from_text(text).parts == parts


@settings(deadline=None)
@given(st.lists(st.sampled_from([OPEN, *OPEN, CLOSE[-1], "a", " ", "\ue000", "\ue001", "\ue0010", "\n"])).map("".join))
def test_text_in_which_nothing_is_closed_stays_as_it_is(text):
    assert BlendPrompt.from_text(text.replace(CLOSE, "")).parts == ((text.replace(CLOSE, ""),) if text else ())


@settings(deadline=None)
@given(st.lists(texts | texts.filter(str.strip).map(Chunk)))
def test_a_prompt_is_one_string_and_back(parts):
    prompt = BlendPrompt(*parts)
    assert BlendPrompt.from_text(prompt.to_text()) == prompt


def test_marking_a_single_text_instead_of_a_list_is_refused():
    with pytest.raises(PromptError, match="list"):
        mark_chunks("one text, whose letters are no chunks")


@pytest.mark.parametrize("delimiter", ["0", "1", "2", "3", "1##", "0x", ESCAPE, f"{ESCAPE}1", f"#{ESCAPE}"])
@pytest.mark.parametrize("chunk", ["plain", "10 2# # 21##", "x 0x 11####", f"{ESCAPE}#{ESCAPE}{ESCAPE}1",
                                   f"a{ESCAPE}x"])
def test_a_delimiter_that_cannot_be_escaped_is_refused_not_garbled(delimiter, chunk):
    try:
        marked = mark_chunks([chunk, "b"], delimiter)
    except PromptError:
        return
    assert BlendPrompt.from_text(marked, delimiter).chunks == [chunk, "b"]


@pytest.mark.parametrize("delimiter", [DELIMITER, "##"])
@pytest.mark.parametrize("separator", ["\n---\n", "#", DELIMITER])
def test_a_separator_never_becomes_a_chunk(separator, delimiter):
    prompt = BlendPrompt.from_text(mark_chunks(["a", "b"], delimiter, separator), delimiter)
    assert prompt.parts == (Chunk("a"), separator, Chunk("b"))


# Texts that are named.


def test_marking_texts_that_the_prompt_holds() -> None:
    prompt = BlendPrompt("before one middle ", Chunk("one"), " two one", add_special_tokens=False)
    marked = prompt.marking(["one", "two one", "three", " "])
    assert marked.parts == ("before ", Chunk("one"), " middle ", Chunk("one"), " ", Chunk("two one"))
    assert marked.text == prompt.text
    assert not marked.add_special_tokens
    assert prompt.marking([]) is prompt


def test_white_space_at_the_ends_of_a_named_text_is_the_chunks_where_the_prompt_has_it() -> None:
    prompt = BlendPrompt("one\n\ntwo  three")
    assert prompt.marking([" one\n", "\ntwo ", "three\n"]).parts == (
        Chunk("one\n"), Chunk("\ntwo "), " ", Chunk("three"))
