"""Answers a question both ways and measures the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from blendrag.demo.prompts import build_prompt, scrambled
from blendrag.documents import DocumentChunk
from blendrag.errors import BlendError
from blendrag.evaluate.metrics import Distribution, divergence

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from blendrag.outputs import BlendOutput
    from blendrag.prompt import BlendPrompt

REPEATS = 3


@dataclass(frozen=True)
class Measurement:
    """One question; seconds are medians of three requests.

    Attributes:
        ttft_full_s: to the first token with a plain full prefill.
        ttft_cold_s: the same through blending with no chunk stored.
        ttft_warm_s: the same with all chunks stored.
        rows: share of a full prefill's rows that the warm request computed.
        kl_first_token: KL(full || blend) of the first token's distribution over the vocabulary, in nats.
        reused: for each chunk, whether the warm request used its stored KV.
    """

    question: str
    chunks: tuple[DocumentChunk, ...]
    answer_full: str
    answer_blend: str
    ttft_full_s: float
    ttft_cold_s: float
    ttft_warm_s: float
    prompt_tokens: int
    rows: float
    kl_first_token: float
    reused: tuple[bool, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        chunks = [{"source": chunk.source, "tokens": chunk.tokens, "reused": reused}
                  for chunk, reused in zip(self.chunks, self.reused, strict=True)]
        return {"question": self.question, "answer_full": self.answer_full, "answer_blend": self.answer_blend,
                "ttft_full_s": self.ttft_full_s, "ttft_cold_s": self.ttft_cold_s, "ttft_warm_s": self.ttft_warm_s,
                "prompt_tokens": self.prompt_tokens, "rows": self.rows, "kl_first_token": self.kl_first_token,
                "chunks": chunks}


def measure(engine: BlendEngine, question: str, chunks: Sequence[DocumentChunk], answer_tokens: int) -> Measurement:
    """Asks the engine, whose store holds the chunks, in each of the three ways, in turns.

    vLLM's prefix cache, which is on, is emptied before each timed request.  The answer and the distribution come from
    untimed requests.
    """
    prompt = build_prompt(engine.tokenizer, question, chunks)
    unknown = scrambled(prompt)
    full, cold, warm = [], [], []
    for _ in range(REPEATS):
        full.append(_ask_anew(engine, prompt, blend=False))
        cold.append(_ask_anew(engine, unknown))
        warm.append(_ask_anew(engine, prompt))
    if any(output.stats.reused_tokens for output in cold):
        raise BlendError("stored KV was found for a prompt that should have none: report it, with the document")
    # The penalty, the same for both, keeps the small model from repeating itself; the first token does not feel it.
    answer: dict[str, Any] = {"max_tokens": answer_tokens, "frequency_penalty": 0.5}
    answer_blend = _ask(engine, prompt, **answer).text
    blended = _distribution(engine, prompt)
    answer_full = _ask_anew(engine, prompt, blend=False, **answer).text
    kl = divergence(_distribution(engine, prompt, blend=False), blended)
    stats = warm[-1].stats
    return Measurement(
        question=question, chunks=tuple(chunks), answer_full=answer_full.strip(), answer_blend=answer_blend.strip(),
        ttft_full_s=_first_token_s(full), ttft_cold_s=_first_token_s(cold), ttft_warm_s=_first_token_s(warm),
        prompt_tokens=stats.prompt_tokens, rows=stats.rows, kl_first_token=kl,
        reused=tuple(chunk.reused for chunk in stats.chunks))


def warm_up(engine: BlendEngine, question: str, chunks: Sequence[DocumentChunk]) -> None:
    """One request of each kind, so that what is compiled and allocated at first use is not in the measurement."""
    prompt = build_prompt(engine.tokenizer, question, chunks)
    _ask_anew(engine, prompt, blend=False)
    _ask_anew(engine, prompt)


def _ask_anew(engine: BlendEngine, prompt: BlendPrompt, **how: Any) -> BlendOutput:
    """`_ask`, with nothing of the prompt in vLLM's prefix cache."""
    engine.reset_prefix_cache()
    return _ask(engine, prompt, **how)


def _ask(engine: BlendEngine, prompt: BlendPrompt, *, blend: bool = True, max_tokens: int = 1,
         **settings: Any) -> BlendOutput:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, **settings)
    return engine.generate(prompt, params, blend=blend)[0]


def _distribution(engine: BlendEngine, prompt: BlendPrompt, blend: bool = True) -> Distribution:
    output = _ask(engine, prompt, blend=blend, logprobs=-1, detokenize=False)
    found = output.outputs[0].logprobs[0]
    return Distribution(np.fromiter(found, np.int64), np.array([one.logprob for one in found.values()]))


def _first_token_s(outputs: Sequence[BlendOutput]) -> float:
    return median(output.stats.first_token_s for output in outputs)
