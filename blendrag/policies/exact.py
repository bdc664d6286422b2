"""No approximation: stored KV stands in only where it is what a full prefill would compute."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from blendrag.policies.base import Dependence, Layout, Policy


@dataclass(frozen=True)
class Exact(Policy):
    """Uses the stored prefix and chunks that were encoded behind exactly the tokens before them; computes the rest.

    Attributes:
        reorder: the chunks of a `BlendPrompt` may change places, so that prompts which share chunks begin alike and
            vLLM's prefix cache holds what they share.  For documents whose order carries no meaning.
    """

    name: ClassVar[str] = "exact"
    exact_only: ClassVar[bool] = True

    reorder: bool = False

    @property
    def depends_on(self) -> Dependence:
        return "entries"

    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        return layout.reused.clone()
