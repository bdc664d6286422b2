"""Log probabilities in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from blendrag import BlendOutput


def logprobs_of(output: BlendOutput, candidate: int = 0, start: int = 0) -> dict[str, Any] | None:
    """`{"content": [{"token", "bytes", "logprob", "top_logprobs": [...]}]}`, natural logarithms; None if not asked for.

    Args:
        candidate: which sample.
        start: tokens of the answer to leave out, those that a stream has told already.
    """
    chosen = output.outputs[candidate]
    if chosen.logprobs is None:
        return None
    tokens = list(chosen.token_ids)
    return {"content": [
        _entry(found[tokens[place]]) | {"top_logprobs": [_entry(one) for one in sorted(
            found.values(), key=lambda one: float(-one.logprob))]}
        for place, found in enumerate(chosen.logprobs[start:], start)
    ]}


def _entry(logprob: Any) -> dict[str, Any]:
    token = logprob.decoded_token or ""
    return {"token": token, "bytes": list(token.encode()), "logprob": float(logprob.logprob)}
