"""What a policy is: the answer to "which tokens of the reused chunks are computed again?"."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
"""A share of something, 0 to 1."""

Reach = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A distance in tokens."""


Dependence = Literal["entries", "chunks", "prompt"]
"""What the KV of a token depends on after a blend pass, besides the tokens before it; see `Policy.depends_on`."""

_serials = count()


@dataclass(frozen=True)
class Deviation:
    """Evidence: how far a token's stored key or value is from a freshly computed one.

    All rows of the prompt, or those that earlier evidence left, are computed up to `layer`; the
    score of a token is the squared L2 distance over heads and head size there.  Their fresh KV
    stays: later passes see it in place of the stored.  Cost: `layer` layers of these rows.
    """

    layer: int
    of: Literal["k", "v"]


@dataclass(frozen=True)
class Attention:
    """Evidence: how much the question attends to a token.

    The question's rows run over the stored context, at global positions.  In each layer of
    `layers` the softmax weights are averaged over heads, reduced over the question's rows by
    `over_rows`, and the layers' results are added up.  Cost: the question's rows, up to the last
    of `layers`.
    """

    layers: tuple[int, ...]
    over_rows: Literal["norm", "mean"]


Evidence = Deviation | Attention


@dataclass(frozen=True)
class Layout:
    """Where the reused chunks lie in a prompt.

    Attributes:
        reused: bool [tokens]; True where stored KV stands in that is approximate at this place.
            Tokens that are False are exact already or are computed in any case.
        chunks: `(start, end)` of each such chunk, in prompt order, ends exclusive.
    """

    reused: torch.Tensor
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Policy(ABC):
    """Chooses the tokens of reused chunks whose KV is recomputed.

    A policy is a frozen dataclass: its fields are its settings and its identity.  It sees no
    model; where it needs evidence it asks for it and is given one score per token.  What it selects
    follows from its settings and its arguments alone.

    Attributes:
        name: what settings and requests call it.
        serial: tells the classes in one process apart, those of the same name too.
        recomputes_all: a blend pass computes every row, so the KV is that of a full prefill.
        exact_only: stored KV is used only where it equals that of a full prefill.
    """

    name: ClassVar[str]
    serial: ClassVar[int]
    recomputes_all: ClassVar[bool] = False
    exact_only: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.serial = next(_serials)

    @property
    def depends_on(self) -> Dependence:
        """What the KV of a token depends on after a blend pass, besides the tokens before it.

        vLLM's prefix cache shares blended blocks among the prompts that agree in it:

        - "entries": which entries stand where.  The choice of a token follows from what precedes it.
        - "chunks": the prompt up to the end of the last chunk.  The policy compares tokens of all chunks, or what is
          not recomputed moves along with what is (`Selective.reach`).
        - "prompt": the whole prompt, the question included.  The default, which is never wrong.
        """
        return "prompt"

    def stronger(self) -> Policy | None:
        """The policy with about twice as much to recompute, up to half of what is reused; None where there is none.

        The quality guard turns to it where answers suffer.
        """
        return None

    def evidence(self, num_layers: int) -> tuple[Evidence, ...]:
        """What has to be measured, one step after the other; `select` is asked after each.  Empty: nothing."""
        return ()

    @abstractmethod
    def select(self, layout: Layout, scores: torch.Tensor | None, step: int = 0) -> torch.Tensor:
        """The tokens to compute again, as far as is known after a step.

        Args:
            layout: where the reused chunks lie.
            scores: float32 [tokens], what the step measured; minus infinity where the step before did not
                choose the token.  None where the policy asks for no evidence.
            step: index of the evidence.

        Returns:
            bool [tokens] on the device of `layout.reused`; True outside `layout.reused`, and for tokens that the
            step before did not choose, is ignored.
        """

    def share_left(self, step: int) -> float:
        """The largest share of the reused tokens that `select` leaves after a step, as far as is known before."""
        return 1.0

    def recomputed(self, lengths: Sequence[int], num_layers: int) -> int:
        """About how many tokens are computed again of reused chunks of these lengths, as far as is known before."""
        last = max(0, len(self.evidence(num_layers)) - 1)
        return round(self.share_left(last) * sum(lengths))

    def settings(self) -> dict[str, Any]:
        """`{"policy": name, setting: value, ...}`, which `make_policy` turns back into the policy."""
        return {"policy": self.name, **asdict(self)}

    @property
    def label(self) -> str:
        """Its name, with the settings that are not its defaults: "query" or "query(ratio=0.3)"."""
        changed = [f"{setting.name}={value}" for setting in fields(self)
                   if (value := getattr(self, setting.name)) != _default(setting)]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclass(frozen=True)
class Selective(Policy):
    """A policy that recomputes some tokens, along with which the others may be moved.

    Attributes:
        reach: the change of a recomputed token's KV is carried over to those around it that are not recomputed,
            with a weight that falls to 1/e at this distance, in tokens.  0: they keep their stored KV.
    """

    reach: Reach = field(default=0.0, kw_only=True)


def twice(ratio: float) -> float:
    """A share of the reused tokens doubled, up to half: recomputing more is hardly cheaper than a full prefill."""
    return max(ratio, min(0.5, 2 * ratio))


def _default(setting: dataclasses.Field[Any]) -> Any:
    if setting.default_factory is not MISSING:
        return setting.default_factory()
    return setting.default


def best(layout: Layout, scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """The `ratio` of the reused tokens with the highest scores, as bool [tokens]; at least one."""
    total = int(layout.reused.sum())
    count = min(total, max(1, round(ratio * total))) if ratio > 0 else 0
    picked = scores.masked_fill(~layout.reused, float("-inf")).topk(count).indices
    chosen = torch.zeros_like(layout.reused)
    chosen[picked] = True
    return chosen
