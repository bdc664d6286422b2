"""No request slower than without us: time to first token against plain vLLM over lengths, hit rates and chunk sizes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rich.table import Table

from blendrag.bench.texts import Vocabulary
from blendrag.engine import BlendEngine
from blendrag.prompt import BlendPrompt, Chunk

LENGTHS = (200, 500, 1000, 2000, 4000, 8000)
RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
CHUNKS = (64, 512)
_PREFIX_TOKENS, _QUESTION_TOKENS = 32, 40


@dataclass(frozen=True)
class Cell:
    """One kind of prompt; seconds are medians.

    Attributes:
        length: of the prompt, as it was asked for; `tokens` is its own.
        rate: share of the prompt's chunks that are stored, as it was asked for; `stored` is what it came to.
        ratio: `ours_s` / `plain_s`.
        best: the same of the quickest runs, which others on the machine disturbed least.
        blended: a blend pass ran.
        estimated_blend_s, estimated_prefill_s: see `BlendStats`.
    """

    model: str
    length: int
    tokens: int
    chunk_tokens: int
    rate: float
    stored: float
    plain_s: float
    ours_s: float
    ratio: float
    best: float
    blended: bool
    estimated_blend_s: float
    estimated_prefill_s: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Grid:
    """What is measured: every length with every rate and chunk size."""

    lengths: Sequence[int] = LENGTHS
    rates: Sequence[float] = RATES
    chunks: Sequence[int] = CHUNKS
    repeats: int = 5


def measure(engine: BlendEngine, grid: Grid, clock: Callable[[], float] = time.perf_counter) -> Iterator[Cell]:
    """Runs each kind of prompt plain and with the engine's settings, in turns; one warm-up each.

    Args:
        clock: seconds; `time.process_time` where others keep the machine busy and torch has one thread.
    """
    texts = Vocabulary(engine.tokens)
    for chunk_tokens, tokens in product(grid.chunks, grid.lengths):
        prompts = _Prompts(engine, texts, tokens, chunk_tokens)
        counts: set[int] = set()
        for rate in sorted(grid.rates):
            stored = prompts.store(rate)
            if stored not in counts:  # a prompt of one chunk has two rates
                counts.add(stored)
                yield _cell(engine, prompts, rate, stored, grid.repeats, clock)


def _cell(engine: BlendEngine, prompts: _Prompts, rate: float, stored: int, repeats: int,
          clock: Callable[[], float]) -> Cell:
    from vllm import SamplingParams

    first = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    output: Any = None
    for number in range(repeats + 1):
        prompt = prompts.prompt(stored, number)
        for blend in (False, True) if number % 2 else (True, False):
            engine.reset_prefix_cache()
            started = clock()
            [answer] = engine.generate(prompt, first, blend=blend)
            seconds[blend].append(clock() - started)
            output = answer if blend else output
    plain, ours = seconds[False][1:], seconds[True][1:]
    stats = output.stats
    return Cell(
        engine.model.rsplit("/", 1)[-1], prompts.length, stats.prompt_tokens, prompts.chunk_tokens,
        rate, stored / len(prompts.chunks),
        statistics.median(plain), statistics.median(ours), statistics.median(ours) / statistics.median(plain),
        min(ours) / min(plain), stats.chunks_reused > 0, stats.estimated_blend_s, stats.estimated_prefill_s)


class _Prompts:
    """Prompts of one length: a prefix, chunks in a new order each time, and a question.

    The first chunks are stored, as many as a rate asks for.
    """

    def __init__(self, engine: BlendEngine, texts: Vocabulary, tokens: int, chunk_tokens: int) -> None:
        self._engine = engine
        self._texts = texts
        self.length, self.chunk_tokens = tokens, chunk_tokens
        room = max(16, tokens - _PREFIX_TOKENS - _QUESTION_TOKENS)
        count = max(1, round(room / chunk_tokens))
        self._name = f"{tokens} {chunk_tokens}"
        self.prefix = texts.text(f"prefix {self._name}", _PREFIX_TOKENS)
        self.chunks = [texts.text(f"chunk {number} of {self._name}", room // count) for number in range(count)]

    def store(self, rate: float) -> int:
        """Encodes chunks up to this rate; returns how many are stored."""
        stored = round(rate * len(self.chunks))
        if stored:
            self._engine.encode(self.chunks[:stored], prefix=self.prefix)
        return stored

    def prompt(self, stored: int, number: int) -> BlendPrompt:
        """A prompt of which so many chunks are stored; of a rate, each number has an order of its own."""
        order = random.Random(f"{self._name} {stored} {number}").sample(self.chunks, len(self.chunks))
        question = self._texts.text(f"question {self._name} {stored} {number}", _QUESTION_TOKENS)
        return BlendPrompt(self.prefix, *map(Chunk, order), question)


def worst(cells: Iterable[Cell]) -> Cell:
    """The cell in which we are slowest against plain vLLM."""
    return max(cells, key=lambda cell: cell.ratio)


def table(cells: Sequence[Cell]) -> Table:
    """Ratios for a terminal; those of requests that were left to vLLM stand in brackets."""
    rates = sorted({round(100 * cell.rate) for cell in cells})
    result = Table(title=f"First token, ours / plain: {cells[0].model}")
    for heading in ("chunks", "tokens", "plain", *(f"{rate} %" for rate in rates)):
        result.add_column(heading, justify="right")
    for chunk_tokens, length in dict.fromkeys((cell.chunk_tokens, cell.length) for cell in cells):
        row = {round(100 * cell.rate): cell for cell in cells
               if (cell.chunk_tokens, cell.length) == (chunk_tokens, length)}
        shown = [_shown(row[rate]) if rate in row else "" for rate in rates]
        plain = statistics.median(cell.plain_s for cell in row.values())
        result.add_row(f"{chunk_tokens}", f"{length:,}", f"{1e3 * plain:.0f} ms", *shown)
    return result


def _shown(cell: Cell) -> str:
    return f"{cell.ratio:.2f}" if cell.blended else f"({cell.ratio:.2f})"
