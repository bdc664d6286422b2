"""What is compared: policies with their settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError
from blendrag.policies import Policy

_RATIO = re.compile(r":\s*ratio\s*=")
_COMMA = re.compile(r",(?![^\[]*\])")  # but not inside of a list


@dataclass(frozen=True)
class Setting:
    """One way of answering.

    Attributes:
        name: as it was asked for: "plain", "default", or a policy's name, with settings where some were given.
        policy: None for vLLM's plain full prefill.
    """

    name: str
    policy: Policy | None

    @property
    def ratio(self) -> float | tuple[float, ...] | None:
        """Share of the reused tokens that is recomputed; None where the policy does not go by one."""
        return getattr(self.policy, "ratio", None)

    @property
    def label(self) -> str:
        """Name and ratio."""
        return labelled(self.name, self.ratio)


PLAIN = Setting("plain", None)
"""The baseline."""

DEFAULT = "default"
"""The name of what the engine uses unasked: its settings' policy, or that of the model's profile."""


def labelled(name: str, ratio: float | Sequence[float] | None) -> str:
    """A setting's name, and its ratio unless the name says it."""
    return name if ratio is None or _RATIO.search(name) else f"{name} {ratio_text(ratio)}"


def ratio_text(ratio: float | Sequence[float]) -> str:
    """A ratio, or one for each check layer, for people."""
    return f"{ratio:g}" if isinstance(ratio, (int, float)) else "/".join(f"{share:g}" for share in ratio)


def settings_of(policies: str, ratios: Sequence[float], config: BlendConfig) -> list[Setting]:
    """The settings that a command line asks for, without the baseline, each once.

    Args:
        policies: names separated by commas, with settings of their own where wanted, "query:reach=0:layers=[0.3, 1]".
            "default" is what an engine with this configuration uses unasked, whatever the ratios.
        ratios: each policy that goes by a ratio is taken with each of them; none: with its own.

    Raises:
        ConfigError: an unknown policy or setting, or a value out of range.
    """
    found: dict[str, Setting] = {}
    for spec in filter(None, map(str.strip, _COMMA.split(policies))):
        name, *pairs = map(str.strip, spec.split(":"))
        if pairs and name in (PLAIN.name, DEFAULT):
            raise ConfigError(f"{name!r} takes no settings: name a policy that does")
        if name == PLAIN.name:
            continue  # it is always there
        if name == DEFAULT:
            made = [Setting(name, config.make_policy())]
        else:
            given = dict(_pair(spec, pair) for pair in pairs)
            policy = config.make_policy(policy={"policy": name, **given})
            several = ratios if hasattr(policy, "ratio") and "ratio" not in given else ()
            made = [Setting(spec, config.make_policy(policy={"policy": name, **given, "ratio": ratio}))
                    for ratio in several]
            made = made or [Setting(spec, policy)]
        found |= {setting.label: setting for setting in made if setting.label not in found}
    if not found:
        raise ConfigError("no policy is named beside plain, which is always there: give some, such as --policies "
                          "default,cacheblend,full")
    return list(found.values())


def _pair(spec: str, pair: str) -> tuple[str, object]:
    name, found, value = pair.partition("=")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        found = ""
    if name.strip() == "policy":
        raise ConfigError(f"{spec!r} names two policies: write the one that you want")
    if not found or not name.strip():
        raise ConfigError(f"{spec!r} is not a policy with settings: write it as query:reach=0:ratio=0.2")
    return name.strip(), parsed
