"""The prompt that a question of a data set becomes."""

from __future__ import annotations

from typing import Any

from blendrag.adapters import chat_prompt, has_chat_template
from blendrag.evaluate.dataset import Question
from blendrag.prompt import BlendPrompt, escape_marks, mark_chunks

INSTRUCTION = "Answer from the passages alone, in at most 5 words, and do not repeat the question."
"""How to answer, unless a question says otherwise."""


def build_prompt(tokenizer: Any, question: Question) -> BlendPrompt:
    """Instruction, chunks, instruction, question; in the model's chat template where it has one.

    The text before the first chunk depends on nothing but the instruction: chunks can be encoded behind it.
    """
    instruction = escape_marks(question.instruction or INSTRUCTION)
    passages = mark_chunks(question.chunks, separator="")
    request = (f"Read these passages; a question follows them. {instruction}\n\nPassages:\n{passages}"
               f"{instruction}\nQuestion: {escape_marks(question.text)}")
    return as_chat(tokenizer, request, "\nAnswer:")


def as_chat(tokenizer: Any, request: str, lead: str) -> BlendPrompt:
    """A user's request with marked chunks, in the model's chat template; followed by `lead` where it has none."""
    if not has_chat_template(tokenizer):
        return BlendPrompt.from_text(f"{request}{lead}")
    return chat_prompt(tokenizer, [{"role": "user", "content": request}])
