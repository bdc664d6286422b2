"""How fast chunks are encoded, against vLLM's own prefill of the same texts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from blendrag.bench.texts import Vocabulary
from blendrag.engine import BlendEngine


@dataclass(frozen=True)
class Figure:
    """One way of computing the KV of chunks.

    Attributes:
        tokens_s: tokens per second, median.
        fastest: the best round, to show the spread.
        kv_gb_s: of KV, GB per second.
    """

    what: str
    tokens_s: float
    fastest: float
    kv_gb_s: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(engine: BlendEngine, what: str, *, chunks: int, chunk_tokens: int, repeats: int,
            plain: bool) -> list[Figure]:
    """Encodes chunks that nobody has seen, and, with `plain`, has vLLM prefill as many in turns.

    The texts are tokenised before: what is timed is the engine.

    Args:
        what: the store.
    """
    from vllm import SamplingParams

    vocabulary = Vocabulary(engine.tokens)
    first = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    ways: dict[str, Callable[[list[str]], object]] = {}
    if plain:
        ways["plain prefill"] = lambda texts: engine.generate(texts, first, blend=False)
    ways[what] = engine.encode
    rates: dict[str, list[float]] = {name: [] for name in ways}
    token_bytes = 0.0
    for number in range(repeats + 1):
        for name, way in ways.items():
            texts = [vocabulary.text(f"{what} {name} {number} {one}", chunk_tokens) for one in range(chunks)]
            tokens = sum(len(engine.tokens.chunk_ids(text)) for text in texts)
            started = time.perf_counter()
            way(texts)
            rates[name].append(tokens / (time.perf_counter() - started))
            if name == what and not token_bytes:
                stats = engine.store.stats
                token_bytes = (stats.disk_bytes or stats.ram_bytes) / tokens
    return [Figure(name, statistics.median(found[1:]), max(found[1:]),
                   statistics.median(found[1:]) * token_bytes / 1e9) for name, found in rates.items()]


def table(figures: Sequence[Figure], title: str) -> Table:
    """The figures side by side; the first one is what the others are compared with."""
    found = Table("", "tokens/s", "fastest", "of plain", "GB of KV/s", title=title)
    for one in figures:
        found.add_row(one.what, f"{one.tokens_s:,.0f}", f"{one.fastest:,.0f}",
                      f"{one.tokens_s / figures[0].tokens_s:.0%}", f"{one.kv_gb_s:.3f}")
    return found
