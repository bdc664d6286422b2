"""Marks in what an application hands over: also old ones, and documents that hold marks themselves."""

import pytest

from blendrag.config import DELIMITER
from blendrag.errors import PromptError
from blendrag.pairs import CLOSE, OPEN
from blendrag.prompt import BlendPrompt, Chunk, mark_chunks
from blendrag.reading import as_prompt

LONG = "The lighthouse at Arlon was built in 1911 from the stones of the older upper lock."
OTHER = "Dry stone walls need no mortar, and they stand for as long as their stones do not move."


def test_prompts_are_taken_as_they_are_and_marks_in_text_are_read():
    prompt = BlendPrompt("a", Chunk("b"), add_special_tokens=False)
    assert as_prompt(prompt, "|") is prompt
    assert as_prompt(f"a{OPEN}b{CLOSE}c") == BlendPrompt("a", Chunk("b"), "c")
    assert as_prompt("a|b|c", "|") == BlendPrompt("a", Chunk("b"), "c")
    assert as_prompt("a|b|c", "|", keep_delimiter=True).text == "a|b|c"


@pytest.mark.parametrize("prompt", [None, 5, ["a"], {"prompt_token_ids": [1]}])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(PromptError, match=f"not {type(prompt).__name__}"):
        as_prompt(prompt)


@pytest.mark.parametrize("document", [f"{OPEN}a{CLOSE} and {OPEN}", f"x{CLOSE}", f"it is {OPEN}"])
def test_a_mark_in_a_document_that_is_named_is_the_documents_own(document):
    text = f"before {document} between {mark_chunks([LONG])} {document}"
    prompt = as_prompt(text, documents=[document, LONG])
    assert prompt.parts == ("before ", Chunk(document), " between ", Chunk(LONG), " ", Chunk(document))


def test_a_delimiter_in_a_document_that_is_named_is_the_documents_own():
    prompt = as_prompt("##a## b##c d", "##", documents=["b##c"])
    assert prompt.parts == (Chunk("a"), " ", Chunk("b##c"), " d")


@pytest.mark.parametrize("delimiter", [None, "##", DELIMITER])
def test_pairs_are_read_whatever_the_delimiter_is(delimiter):
    prompt = BlendPrompt("a ## ", Chunk("b ## c\uf4b1"), " ## \uf4b1")
    assert as_prompt(prompt.to_text(), delimiter) == prompt
    assert as_prompt(BlendPrompt("a ## \uf4b1").to_text(), delimiter).text == "a ## \uf4b1"


def test_a_named_document_with_marks_does_not_hide_those_around_it():
    document = f"x {OPEN}y{CLOSE}"
    assert as_prompt(f"##{LONG}## {document}", "##", documents=[document]).parts == (Chunk(LONG), " ", Chunk(document))


# Single U+E000 characters: older versions toggled with them.


@pytest.mark.parametrize(("text", "parts"), [
    (f"Read.\n{DELIMITER}{LONG}{DELIMITER}\nWho?", ("Read.\n", Chunk(LONG), "\nWho?")),
    (f"{DELIMITER}{LONG}{DELIMITER}\n\n{DELIMITER}{OTHER}{DELIMITER}", (Chunk(LONG), "\n\n", Chunk(OTHER))),
    (f"{DELIMITER}{LONG}{DELIMITER}\ue0013\n---\n{DELIMITER}{OTHER}{DELIMITER} Who?",
     (Chunk(LONG), "\n---\n", Chunk(OTHER), " Who?")),
])
def test_old_marks_are_understood_where_nothing_else_can_be_meant(text, parts, caplog):
    assert as_prompt(text).parts == parts
    assert BlendPrompt.from_text(text).parts == (text,)


@pytest.mark.parametrize("text", [
    f"Go {DELIMITER} home {DELIMITER} now",  # icons
    f"{DELIMITER} {LONG}\n{DELIMITER} {OTHER}\n",  # bullets
    f"the o{DELIMITER}ce {LONG} was sti{DELIMITER} open",  # a ligature of a PDF's own font
    f"{DELIMITER}{LONG}",
    f"{DELIMITER}{LONG}{DELIMITER} and {DELIMITER}{OTHER}{DELIMITER}",
    f"{DELIMITER}{LONG}{DELIMITER}\n{DELIMITER}",
    f"a {DELIMITER}short{DELIMITER} text",
    DELIMITER,
])
def test_other_private_use_characters_stay_as_they_are(text):
    assert as_prompt(text).parts == (text,)


def test_an_old_mark_in_a_document_that_is_named_is_the_documents_own():
    document = f"See:\n{DELIMITER}{LONG}{DELIMITER}"
    assert as_prompt(f"{document}\nWho?", documents=[document]).parts == (Chunk(document), "\nWho?")


def test_a_delimiter_that_is_configured_is_read_everywhere():
    assert as_prompt(f"a{DELIMITER} home {DELIMITER}", DELIMITER).parts == ("a", Chunk(" home "))
