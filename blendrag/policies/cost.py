"""What a policy's scoring passes cost."""

from __future__ import annotations

from blendrag.errors import ConfigError
from blendrag.policies.base import Deviation, Policy


def scoring_cost(policy: Policy, num_layers: int) -> float:
    """Rows x layers of all scoring passes over those of a full prefill, of a prompt that is all reused chunks."""
    cost, share = 0.0, 1.0
    for step, evidence in enumerate(policy.evidence(num_layers)):
        depth = evidence.layer + 1 if isinstance(evidence, Deviation) else evidence.layers[-1] + 1
        cost += share * depth / num_layers
        share = min(share, policy.share_left(step))
    return cost


def require_affordable(policy: Policy, num_layers: int) -> None:
    """Refuses a policy whose scoring passes may compute more than a full prefill does.

    Raises:
        ConfigError: it is one.
    """
    cost = scoring_cost(policy, num_layers)
    if cost > 1 + 1e-9:
        field = "check_layers" if hasattr(policy, "check_layers") else "evidence"
        raise ConfigError(f"policy {policy.name!r}: {field}: its scoring passes may compute {cost:.2g} times what a "
                          f"full prefill of {num_layers} layers does: name fewer or earlier layers, or a smaller ratio")
