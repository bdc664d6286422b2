"""Writes docs/models.md from the table of families: `python -m tests.engine.models_page`.

A row says what tests/engine/test_conformance.py holds its family to; the page is no place for hopes.
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.families import FAMILIES, Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
# Models

blendrag runs the model that vLLM loaded and adds no code of its own for any of them, so what counts is how a model's
attention works, not what it is called. A model that is not in this table but resembles one that is will most likely
work too: `BlendEngine` looks at the model when it starts, tries out that its keys can be moved, and raises
`ModelError` with the reason where blending would be wrong. Nothing is blended on the off chance.

**Works** means: with all rows recomputed, first-token probabilities and answers equal plain vLLM's in float32, with
chunks at the start, in the middle, at the end and repeated; and a stored chunk's keys, moved to several positions,
equal those the model computes there, in every layer. Each row is a test with a small random-weight model of that
family, on a CPU.

| family | models | what is special | result |
|---|---|---|---|
"""

_TAIL = """\

## What is never supported

Reusing a chunk anywhere needs two things: that a layer keeps keys and values token by token, and that a key's position
can be taken out and put in again. Recurrent layers (Mamba and its relatives, linear attention) keep one running state
in which no chunk can be told apart. Encoder-decoder models keep the prompt in an encoder that reads it as a whole.
Learned positions and ALiBi do not live in the keys, or not in a way that can be undone. These will stay refused.
Latent attention (MLA), attention sinks, layers that share KV or differ in the shape of their heads, and a quantised
KV cache could be blended in principle; the code for it is not there, and they are refused until it is. An image,
sound or video makes the tokens around it depend on what they stand next to: such requests are prefilled in full and say
`multimodal request` in their statistics, while text requests to the same model are blended.

## Where a model's rotation comes from

From the rotary module of each attention layer, or, for models that vLLM runs through transformers, from the one module
they have. LongRoPE has two tables; vLLM takes one when it starts and keeps to it, so set `max_model_len` to what you
need. At start-up the model runs twice over 16 tokens, at the beginning and far into a prompt. That is how layers
without positions are noticed, even where they own a rotary module that they do not use, and how anything unknown is
refused.

This page is generated: `python -m tests.engine.models_page`.
"""


def row(family: Family) -> str:
    """The family's line of the table."""
    cells = family.name, family.examples, family.special, _result(family)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _result(family: Family) -> str:
    if not family.refusal:
        return "works"
    if family.by_vllm:
        return f"vLLM on the CPU cannot run it: {family.reason}"
    return f"refused: {family.reason}"


def page() -> str:
    """The whole page."""
    working = sorted(FAMILIES, key=lambda family: bool(family.refusal))
    return _HEAD + "".join(map(row, working)) + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
