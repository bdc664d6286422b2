"""The prompt that a question of a data set becomes, and how a conversation goes on behind it."""

from __future__ import annotations

from typing import Any

from blendrag.adapters import chat_prompt, has_chat_template, render_chat
from blendrag.errors import BlendError
from blendrag.evaluate.dataset import FollowUp, Question
from blendrag.prompt import BlendPrompt, escape_marks, mark_chunks

INSTRUCTION = "Answer from the passages alone, in at most 5 words, and do not repeat the question."
"""How to answer, unless a question says otherwise."""

_LEAD = "\nAnswer:"  # what an answer stands behind where there is no chat template
_FIRST, _ANSWER, _NEXT = "blendragfirst", "blendraganswer", "blendragnext"


def build_prompt(tokenizer: Any, question: Question) -> BlendPrompt:
    """Instruction, chunks, instruction, question; in the model's chat template where it has one.

    The text before the first chunk depends on nothing but the instruction: chunks can be encoded behind it.
    """
    instruction = escape_marks(question.instruction or INSTRUCTION)
    passages = mark_chunks(question.chunks, separator="")
    request = (f"Read these passages; a question follows them. {instruction}\n\nPassages:\n{passages}"
               f"{instruction}\nQuestion: {escape_marks(question.text)}")
    return as_chat(tokenizer, request, _LEAD)


def as_chat(tokenizer: Any, request: str, lead: str) -> BlendPrompt:
    """A user's request with marked chunks, in the model's chat template; followed by `lead` where it has none."""
    if not has_chat_template(tokenizer):
        return BlendPrompt.from_text(f"{request}{lead}")
    return chat_prompt(tokenizer, [{"role": "user", "content": request}])


def with_answer(tokenizer: Any, prompt: BlendPrompt, answer: str) -> BlendPrompt:
    """A prompt and its answer, white space at the answer's ends aside."""
    space = "" if has_chat_template(tokenizer) else " "
    return _extend(prompt, f"{space}{answer.strip()}")


def follow_up_prompt(tokenizer: Any, prompt: BlendPrompt, answer: str, follow_up: FollowUp) -> BlendPrompt:
    """The next turn: the prompt of the one before it as it stands, its answer, instruction, question.

    Templates may show an earlier turn otherwise than they showed it last (without its thoughts, for instance); here it
    stays as it was, so that its tokens begin the new prompt.

    Raises:
        BlendError: the chat template shows no answer with a question behind it.
    """
    between, lead = _frame(tokenizer)
    request = f"{follow_up.instruction or INSTRUCTION}\nQuestion: {follow_up.text}"
    return _extend(with_answer(tokenizer, prompt, answer), f"{between}{request}{lead}")


def _frame(tokenizer: Any) -> tuple[str, str]:
    """The chat template's own text between an answer and the next question, and behind that question."""
    if not has_chat_template(tokenizer):
        return "\n\n", _LEAD
    text = render_chat(tokenizer, [{"role": "user", "content": _FIRST}, {"role": "assistant", "content": _ANSWER},
                                   {"role": "user", "content": _NEXT}])
    between, following, lead = text.partition(_ANSWER)[2].partition(_NEXT)
    if not following:
        raise BlendError("the model's chat template shows no answer with a question behind it: measure its "
                         "conversations with another template, or single questions")
    return between, lead


def _extend(prompt: BlendPrompt, text: str) -> BlendPrompt:
    return BlendPrompt(*prompt.parts, text, add_special_tokens=prompt.add_special_tokens)
