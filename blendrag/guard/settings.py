"""The settings of the quality guard."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.errors import ConfigError


class QualityGuard(BaseModel):
    """What live requests are checked for, how often, and when blending has to give way.

    Attributes:
        share: of the requests that reuse chunks, those that are audited: beside its answer, the first token's
            distribution is computed blended and in full.  An audit costs about one full prefill, when nobody waits;
            where there is always somebody, after 256 steps.
        max_kl: largest mean KL(full || blended) of the first token, in nats, that is accepted.
        min_top1: smallest share of requests whose likeliest first token must be a full prefill's; None: not asked for.
        confidence: of the bounds, and so of each decision.
        window: the latest audits that a decision, and what is told, rests on.
        queue: audits that may wait; what comes while so many do is not audited.

    Raises:
        ConfigError: an unknown setting, or a value out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: Annotated[float, Field(gt=0, le=1)] = 0.02
    max_kl: Annotated[float, Field(gt=0, le=1000)] = 0.3
    min_top1: Annotated[float, Field(gt=0, lt=1)] | None = None
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    window: Annotated[int, Field(ge=50, le=2_000)] = 200
    queue: Annotated[int, Field(ge=1)] = 16

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                raise ConfigError(f"quality_guard has no setting {name!r}: choose from "
                                  f"{', '.join(type(self).model_fields)}") from error
            raise ConfigError(f"quality_guard: {name}: {problem['msg'][0].lower()}{problem['msg'][1:]} "
                              f"(got {problem['input']!r})") from error
