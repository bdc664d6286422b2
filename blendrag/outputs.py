"""What an engine returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blendrag.stats import BlendStats


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk that went through `BlendEngine.encode`.

    Attributes:
        key: names its KV in the store; empty where the chunk is too short to be stored.
        tokens: its length.
        new: computed now; False where it was stored already.
    """

    key: str
    tokens: int
    new: bool


@dataclass(frozen=True)
class BlendOutput:
    """A request's output so far.

    Attributes:
        request_output: vLLM's `RequestOutput`.
        stats: what blending did; complete once `finished`.
    """

    request_output: Any
    stats: BlendStats

    @property
    def outputs(self) -> list[Any]:
        """vLLM's `CompletionOutput`s, one for each of `n` samples."""
        return list(self.request_output.outputs)

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return str(self.outputs[0].text)

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sample."""
        return list(self.outputs[0].token_ids)

    @property
    def finish_reason(self) -> str | None:
        """Why the first sample ended: "stop", "length", ...; None while it runs."""
        reason: str | None = self.outputs[0].finish_reason
        return reason

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model was sent it."""
        return list(self.request_output.prompt_token_ids or [])

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return bool(self.request_output.finished)
