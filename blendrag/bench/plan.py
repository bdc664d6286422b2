"""What the front end costs: tokenising a prompt, and planning it on the scheduler's thread; no engine is needed."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table

from blendrag.bench.texts import Vocabulary
from blendrag.blend_params import BLEND_PARAMS_KEY
from blendrag.config import BlendConfig
from blendrag.prompt import BlendPrompt, Chunk
from blendrag.runtime.messages import ModelFacts
from blendrag.runtime.planning.locating import DocumentTokens, as_ids
from blendrag.runtime.planning.marks import parse_blend_params
from blendrag.runtime.planning.planner import Planner
from blendrag.runtime.planning.salt import salt_block_hashes
from blendrag.store import ChunkStore, KVEntry, entry_key
from blendrag.store.keys import NEUTRAL
from blendrag.tokens import SegmentTokenizer, TokenizedPrompt

_MODEL, _SCOPE, _LAYERS = "bench", "default", 32
_BLOCK_TOKENS, _HASH_BYTES = 16, 32
_WARM_UP = 3


@dataclass(frozen=True)
class Figure:
    """One step of the front end; times in milliseconds.

    Attributes:
        least_ms: the quickest of all, which other work on the machine disturbs least.
    """

    step: str
    least_ms: float
    median_ms: float


class PlanBench:
    """Stored chunks, and prompts of all of them, each time in a new order and with a new question.

    Args:
        count: chunks in a prompt.
        length: tokens of a chunk, about.
        path: folder of a store on disk; None for one in RAM.
    """

    def __init__(self, tokens: SegmentTokenizer, count: int, length: int, path: Path | None = None) -> None:
        self._tokens = tokens
        self._random = random.Random(0)
        vocabulary = Vocabulary(tokens)
        self._chunks = [vocabulary.text(f"chunk {number}", length) for number in range(count)]
        self._store = ChunkStore(path)
        self._planner = Planner(BlendConfig(), self._store)
        self._planner.know(ModelFacts(_MODEL, _LAYERS))
        self._documents = DocumentTokens(tokens)

    def close(self) -> None:
        """Closes the store."""
        self._store.close()

    def measure(self, repeats: int) -> tuple[int, list[Figure]]:
        """The tokens of a prompt, and what each step takes; `repeats` prompts for each."""
        new = [_timed(partial(self._tokens.chunk_ids, f"{chunk} "))[0] for chunk in self._chunks]
        self._fill()
        figures = [Figure("tokenising, all chunks new", sum(new), sum(new))]
        figures.append(self._figure("tokenising, chunks known", repeats, self._tokenise))
        ways: dict[str, Callable[[TokenizedPrompt], dict[str, Any]]] = {
            "spans": lambda prompt: {"spans": [list(span) for span in prompt.spans]},
            "nothing marked": lambda prompt: {},
            "documents, as texts": lambda prompt: {"documents": self._chunks},
            "documents, as token ids": lambda prompt: {
                "document_ids": [prompt.ids[start:end] for start, end in prompt.spans]},
        }
        for name, marks in ways.items():
            figures.append(self._figure(f"planning, {name}", repeats, partial(self._plan, marks)))
        return len(self._prompt().ids), figures

    def _figure(self, step: str, repeats: int, run: Callable[[], float]) -> Figure:
        times = [run() for _ in range(repeats + _WARM_UP)][_WARM_UP:]
        return Figure(step, min(times), statistics.median(times))

    def _fill(self) -> None:
        for chunk in self._chunks:
            ids = self._tokens.chunk_ids(chunk)
            kv = torch.zeros(1, len(ids), 1, 1)
            self._store.put(entry_key(_MODEL, _SCOPE, NEUTRAL, ids), KVEntry(kv, kv), fingerprint=_MODEL,
                            namespace=_SCOPE, prefix=NEUTRAL, ids=ids)

    def _text(self) -> BlendPrompt:
        texts = self._random.sample(self._chunks, len(self._chunks))
        between = [part for text in texts for part in (Chunk(text), "\n\n")]
        return BlendPrompt("Answer from these passages.\n\n", *between, f"Which is number {self._random.random()}?")

    def _prompt(self) -> TokenizedPrompt:
        return self._tokens(self._text())

    def _tokenise(self) -> float:
        text = self._text()
        return _timed(lambda: self._tokens(text))[0]

    def _plan(self, marks: Callable[[TokenizedPrompt], dict[str, Any]]) -> float:
        prompt = self._prompt()
        request: Any = SimpleNamespace(
            request_id="bench", prompt_token_ids=prompt.ids, cache_salt=None, lora_request=None, prompt_embeds=None,
            mm_features=[], skip_reading_prefix_cache=False, kv_transfer_params={BLEND_PARAMS_KEY: marks(prompt)},
            block_hashes=[os.urandom(_HASH_BYTES) for _ in range(len(prompt.ids) // _BLOCK_TOKENS)],
            _block_hasher=lambda request: [])

        def plan() -> int:
            """As `BlendConnector.on_new_request`."""
            params = parse_blend_params(request, [])
            assert params is not None
            documents = chain(map(as_ids, params.document_ids), self._documents(params.documents, prompt.ids))
            plan = self._planner.plan(request, params.spans, params.policy, documents)
            assert plan is not None
            self._planner.prefer_exact(plan, 0)
            salt_block_hashes(request, ((plan.exact_tokens, plan.salt),), _BLOCK_TOKENS)
            return plan.stats.chunks_reused

        milliseconds, reused = _timed(plan)
        assert reused == len(self._chunks), f"{reused} of {len(self._chunks)} chunks were found"
        return milliseconds


def table(figures: Sequence[Figure], tokens: int, chunks: int) -> Table:
    """The figures for a terminal."""
    result = Table(title=f"The front end: a prompt of {tokens:,} tokens, {chunks} stored chunks")
    for heading in ("step", "least", "median"):
        result.add_column(heading, justify="left" if heading == "step" else "right")
    for f in figures:
        result.add_row(f.step, f"{f.least_ms:.2f} ms", f"{f.median_ms:.2f} ms")
    return result


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    started = time.perf_counter()
    result = run()
    return 1e3 * (time.perf_counter() - started), result
