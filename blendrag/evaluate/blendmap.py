"""A prompt as a map of its blend pass: which tokens scored high, which were computed again, where chunks begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from blendrag.engine import BlendEngine
from blendrag.evaluate.ask import encoded_prompt, request
from blendrag.evaluate.run import Evaluation
from blendrag.evaluate.settings import Setting
from blendrag.stats import BlendStats, ChunkStats

SHADES = 6
"""Shades of a score that report.css defines; each stands for as many tokens as the others."""


@dataclass(frozen=True)
class MappedPrompt:
    """What a map is drawn from: the prompt's text, token by token, and what was done with each token."""

    question: str
    setting: Setting
    pieces: Sequence[str]
    stats: BlendStats


def map_prompt(engine: BlendEngine, evaluation: Evaluation) -> MappedPrompt | None:
    """Asks the first question once more and has it explained; by the first setting that measures scores.

    None where no blend pass ran for it.
    """
    from vllm import SamplingParams

    question = evaluation.questions[0]
    blended = [setting for setting in evaluation.settings if setting.policy is not None]
    setting = next((s for s in blended if s.policy is not None and s.policy.evidence(num_layers=2)), blended[0])
    prompt = encoded_prompt(engine, question)
    output = request(engine, prompt, setting, SamplingParams(temperature=0, max_tokens=1), explain=True)
    if output.stats.map is None:
        return None
    return MappedPrompt(question.text, setting, pieces_of(engine.tokenizer, output.prompt_token_ids), output.stats)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, so that they join to the whole text; tokens that are part of a character go with its
    last one."""
    pieces = []
    before: list[int] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        # A token's text may depend on the one before it (a space at the start).
        known = tokenizer.decode(before)
        text = tokenizer.decode(before + pending)[len(known):]
        complete = not text.endswith("\ufffd") or len(pending) > 3
        pieces.append(text if complete else "")
        if complete:
            before, pending = pending, []
    return pieces


def draw(mapped: MappedPrompt) -> str:
    """An HTML fragment: the prompt's text in blocks, one for each chunk and for what lies between."""
    assert mapped.stats.map is not None
    shades = _shades(mapped.stats.map.scores)
    blocks = []
    at = number = 0
    for chunk in sorted(mapped.stats.chunks, key=lambda chunk: chunk.start):
        if chunk.start < at:
            continue  # not in the prompt
        if chunk.start > at:
            blocks.append(_block(mapped, shades, at, chunk.start, ""))
        at = chunk.start + chunk.tokens
        number += 1
        blocks.append(_block(mapped, shades, chunk.start, at, _head(number, chunk, mapped)))
    if at < len(mapped.pieces):
        blocks.append(_block(mapped, shades, at, len(mapped.pieces), ""))
    return "".join(blocks)


def _head(number: int, chunk: ChunkStats, mapped: MappedPrompt) -> str:
    assert mapped.stats.map is not None
    again = sum(mapped.stats.map.computed[chunk.start : chunk.start + chunk.tokens])
    if not chunk.reused:
        told = f"computed: {chunk.reason}"
    elif chunk.exact:
        told = "reused, exact where it stands"
    else:
        told = f"reused, {again} of its tokens computed again ({again / max(1, chunk.tokens):.0%})"
    return f"chunk {number} · {chunk.tokens} tokens · {told}"


def _block(mapped: MappedPrompt, shades: Sequence[int], start: int, end: int, head: str) -> str:
    found = mapped.stats.map
    assert found is not None

    def look(token: int) -> tuple[int, bool]:
        return shades[token], found.stored[token] and found.computed[token]

    spans = []
    for (shade, again), tokens in groupby(range(start, end), key=look):
        text = escape("".join(mapped.pieces[token] for token in tokens))
        classes = " ".join(([f"s{shade}"] if shade else []) + (["again"] if again else []))
        spans.append(f'<span class="{classes}">{text}</span>' if classes else text)
    body = f'<div class="text">{"".join(spans)}</div>'
    if not head:
        return f'<div class="between">{body}</div>'
    return f'<div class="chunk"><div class="head">{escape(head)}</div>{body}</div>'


def _shades(scores: Sequence[float | None]) -> list[int]:
    """1 to `SHADES` by rank, 0 where nothing was measured: a few tokens score far above all others."""
    ranked = sorted((token for token, score in enumerate(scores) if score is not None), key=lambda t: scores[t] or 0.0)
    shades = [0] * len(scores)
    for rank, token in enumerate(ranked):
        shades[token] = 1 + rank * SHADES // len(ranked)
    return shades
