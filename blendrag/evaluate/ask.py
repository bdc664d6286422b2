"""Asks an engine one question in one way, and makes sure that it was answered in that way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blendrag.engine import BlendEngine
from blendrag.errors import BlendError, ConfigError
from blendrag.evaluate.dataset import Question
from blendrag.evaluate.metrics import Distribution
from blendrag.evaluate.prompts import build_prompt
from blendrag.evaluate.settings import Setting
from blendrag.outputs import BlendOutput
from blendrag.prompt import BlendPrompt

TOP_TOKENS = 16384
"""Tokens of each place whose probabilities are asked for, of a vocabulary that has as many."""

FORCED_TOKENS = 16
"""Tokens of the full prefill's answer along which distributions are compared."""


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        token_ids: the answer; greedy.
        rows: see `BlendStats`.
        first_token_s: seconds to the first token, of a request that asked for nothing but the answer.
        cached: share of the prompt's tokens that vLLM's prefix cache held.
        continued: see `BlendStats`.
    """

    text: str
    token_ids: tuple[int, ...]
    rows: float
    first_token_s: float
    cached: float = 0.0
    continued: bool = False


def engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The engine arguments that `expected_along` needs, on top of those that a user gave."""
    from blendrag.runtime.forcing import PROCESSOR

    processors = [*(given.get("logits_processors") or ()), PROCESSOR]
    most = given.get("max_logprobs") or 0
    return {"logits_processors": processors, "max_logprobs": most if most == -1 else max(most, TOP_TOKENS)}


def encoded_prompt(engine: BlendEngine, question: Question) -> BlendPrompt:
    """A question's prompt, its chunks stored behind the text that precedes the first of them, as a retriever does it.

    Raises:
        BlendError: a chunk does not fit the model, or the chunks do not fit the store: they would be computed.
    """
    prompt = build_prompt(engine.tokenizer, question)
    encoded = engine.encode(question.chunks, prefix=prompt)
    there = engine.stored(question.chunks, prefix=prompt)
    # One without a key is too short to be worth storing.
    if lost := sum(bool(chunk.key) and not stored for chunk, stored in zip(encoded, there, strict=True)):
        raise BlendError(f"{lost} of its {len(question.chunks)} chunks do not fit the store beside the others: raise "
                         "ram_bytes")
    return prompt


def answer(engine: BlendEngine, prompt: BlendPrompt, setting: Setting, tokens: int, *, reset: bool = True) -> Answer:
    """The answer of at most so many tokens; the only request that runs, unless other threads use the engine.

    Args:
        reset: see `request`.

    Raises:
        BlendError: see `request`.
    """
    from vllm import SamplingParams

    output = request(engine, prompt, setting, SamplingParams(temperature=0, max_tokens=tokens), reset=reset)
    stats = output.stats
    return Answer(output.text, tuple(output.token_ids), stats.rows, stats.first_token_s,
                  stats.prefix_cached_tokens / max(1, stats.prompt_tokens), stats.continued)


@dataclass(frozen=True)
class Expected:
    """What the model expects along a given answer.

    Attributes:
        places: at each of its tokens, behind those before it.
        rows: see `BlendStats`.
    """

    places: list[Distribution]
    rows: float


def expected_along(engine: BlendEngine, prompt: BlendPrompt, setting: Setting, token_ids: Sequence[int], *,
                   reset: bool = True) -> Expected:
    """What the model expects at each place of an answer that is forced on it (teacher forcing).

    Args:
        reset: see `request`.

    Raises:
        ConfigError: the engine was started without `engine_arguments`.
        BlendError: see `request`.
    """
    from blendrag.runtime.forcing import read_logprobs

    top = min(TOP_TOKENS, engine.tokenizer.vocab_size)
    output = force(engine, prompt, setting, token_ids, top, reset=reset)
    places = [Distribution(ids, logprobs) for ids, logprobs in read_logprobs(output.outputs[0])]
    if any(np.isnan(place.logprobs).any() for place in places):
        raise BlendError(f"what the model expects with {setting.label} are not numbers: try another --dtype")
    return Expected(places, output.stats.rows)


def force(engine: BlendEngine, prompt: BlendPrompt, setting: Setting, token_ids: Sequence[int], top: int = 0, *,
           reset: bool = True) -> BlendOutput:
    """A request that answers with these tokens, whatever the model expects.

    Args:
        top: tokens of each place whose log-probabilities are wanted.
        reset: see `request`.

    Raises:
        ConfigError: the engine was started without `engine_arguments`.
        BlendError: see `request`.
    """
    from blendrag.runtime.forcing import forced_params

    output = request(engine, prompt, setting, forced_params(token_ids, top), reset=reset)
    if output.token_ids != list(token_ids):
        raise ConfigError("the engine does not give answers that are forced on it: start it with the engine arguments "
                          "of blendrag.evaluate.engine_arguments")
    return output


def request(engine: BlendEngine, prompt: BlendPrompt, setting: Setting, params: Any, *, explain: bool = False,
            reset: bool = True) -> BlendOutput:
    """One request, whose KV comes from a pass of its own: vLLM's prefix cache, which is on, is emptied before it.

    Args:
        reset: False leaves the cache as it is, for a prompt that continues an earlier one.

    Raises:
        BlendError: the prompt does not fit the model, or the request was not answered in this way.
    """
    plain = setting.policy is None
    how: dict[str, Any] = {"blend": False}
    if not plain:
        how = {"blend": "always", "policy": setting.policy, "explain": explain}
    if reset:
        engine.reset_prefix_cache()
    [output] = engine.generate(prompt, params, **how)
    stats = output.stats
    if stats.failure:
        raise BlendError(f"the blend pass failed ({stats.failure}): report it, if memory was not short")
    if reset and stats.prefix_cached_tokens:
        raise BlendError(f"vLLM's prefix cache held {stats.prefix_cached_tokens} tokens of a new prompt: report it")
    return output
