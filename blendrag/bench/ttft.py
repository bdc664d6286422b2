"""Time to first token of blended prompts against plain vLLM, in one process."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from blendrag.bench.texts import Vocabulary
from blendrag.engine import BlendEngine
from blendrag.prompt import BlendPrompt, Chunk

_QUESTION_TOKENS = 40


@dataclass(frozen=True)
class Figure:
    """One line of the result; seconds are medians.

    Attributes:
        policy: "plain" for vLLM's full prefill.
        first_s: fastest run, to show the spread.
        speedup: plain's `ttft_s` / this one's.
    """

    policy: str
    prompt_tokens: int
    reused_share: float
    rows: float
    ttft_s: float
    first_s: float
    load_s: float
    score_s: float
    blend_s: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(engine: BlendEngine, *, tokens: int, share: float, chunk_tokens: int, policies: Sequence[str | None],
            ratio: float | None, repeats: int) -> list[Figure]:
    """Runs `repeats` prompts plain and with each policy, interleaved; every prompt is new to vLLM's prefix cache.

    Args:
        tokens: length of the prompts.
        share: of the prompt that is chunks; the rest is a question of 40 tokens behind them, and before them the
            system prompt they were encoded behind.
        policies: names; None for the engine's default.
    """
    maker = _PromptMaker(engine, tokens, share, chunk_tokens)
    engine.encode(maker.chunks, prefix=maker.prefix)
    runs: dict[str | None, list[Any]] = {"plain": [], **{policy: [] for policy in policies}}
    for number in range(repeats + 1):
        for name, outputs in runs.items():
            outputs.append(maker.run(name, ratio, number))
    figures: list[Figure] = []
    for name, outputs in runs.items():
        stats = [output.stats for output in outputs[1:]]  # the first run warms up
        seconds = statistics.median(s.first_token_s for s in stats)
        length = stats[0].prompt_tokens
        figures.append(Figure(
            name or stats[0].policy, length, stats[0].reused_tokens / length, statistics.median(s.rows for s in stats),
            seconds, min(s.first_token_s for s in stats), statistics.median(s.load_s for s in stats),
            statistics.median(s.score_s for s in stats), statistics.median(s.blend_s for s in stats),
            figures[0].ttft_s / seconds if figures else 1.0))
    return figures


class _PromptMaker:
    """Prompts of one length whose chunks come in a new order each time."""

    def __init__(self, engine: BlendEngine, tokens: int, share: float, chunk_tokens: int) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._vocabulary = Vocabulary(engine.tokens)
        count = max(1, round(tokens * share / chunk_tokens))
        length = round(tokens * share / count)
        self.chunks = [self._vocabulary.text(f"chunk {number}", length) for number in range(count)]
        rest = tokens - sum(len(engine.tokens.chunk_ids(chunk)) for chunk in self.chunks)
        self.prefix = self._vocabulary.text("prefix", max(1, rest - _QUESTION_TOKENS))

    def run(self, policy: str | None, ratio: float | None, number: int) -> Any:
        """One new prompt; its output, first token only."""
        from vllm import SamplingParams

        chunks = self._random.sample(self.chunks, len(self.chunks))
        question = self._vocabulary.text(f"question {policy} {number}", _QUESTION_TOKENS)
        prompt = BlendPrompt(self.prefix, *map(Chunk, chunks), question)
        how = {"blend": False} if policy == "plain" else {"policy": policy, "ratio": ratio}
        self._engine.reset_prefix_cache()
        [output] = self._engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0, detokenize=False), **how)
        return output


def table(figures: Sequence[Figure]) -> Table:
    """The figures for a terminal."""
    result = Table(title=f"Time to first token, {figures[0].prompt_tokens} tokens")
    for heading in ("policy", "reused", "rows", "first token", "fastest", "load", "score", "blend", "speed-up"):
        result.add_column(heading, justify="left" if heading == "policy" else "right")
    for f in figures:
        result.add_row(f.policy, f"{f.reused_share:.0%}", f"{f.rows:.3f}", f"{1e3 * f.ttft_s:.0f} ms",
                       f"{1e3 * f.first_s:.0f} ms", f"{1e3 * f.load_s:.1f} ms", f"{1e3 * f.score_s:.0f} ms",
                       f"{1e3 * f.blend_s:.0f} ms", f"{f.speedup:.1f}x")
    return result
