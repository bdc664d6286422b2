"""Sorts the arguments of a framework's call into vLLM's sampling parameters and blendrag's options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blendrag import BlendEngine
from blendrag.errors import ConfigError
from blendrag.policies import POLICIES

if TYPE_CHECKING:
    from blendrag import SamplingParams

_KEYWORDS = [p.name for p in inspect.signature(BlendEngine.generate).parameters.values() if p.kind is p.KEYWORD_ONLY]
OPTIONS = {*_KEYWORDS}.union(*(kind.__dataclass_fields__ for kind in POLICIES.values()))
"""What `BlendEngine.generate` takes besides sampling parameters: blend, policy, ratio, the policies' settings, ..."""


@dataclass(frozen=True)
class Call:
    """Arguments of `BlendEngine.generate` and `BlendEngine.stream`."""

    params: SamplingParams
    options: dict[str, Any]


def split_arguments(defaults: Mapping[str, Any], arguments: Mapping[str, Any],
                    stop: Sequence[str] | None = None) -> Call:
    """Sampling parameters and blend options of one call.

    Args:
        defaults: sampling parameters of the model object; None means vLLM's default.
        arguments: of the call; they win over the defaults.
        stop: stop sequences of the call, which are added to those of the model object.

    Raises:
        ConfigError: an argument that neither vLLM nor blendrag knows.
    """
    from blendrag import SamplingParams  # loads vLLM: not before the first request

    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    if unknown := sorted(set(arguments) - known - OPTIONS):
        raise ConfigError(f"there is no argument {unknown[0]!r}: use a field of vLLM's SamplingParams, or blend, "
                          "policy, ratio and the policy's own settings")
    sampling = dict(defaults) | {name: value for name, value in arguments.items() if name in known}
    sampling["stop"] = _merge(defaults.get("stop"), arguments.get("stop"), stop)
    # max_tokens=None has a meaning of its own: up to the end of the context window.
    given = {name: value for name, value in sampling.items() if value is not None or name == "max_tokens"}
    options = {name: value for name, value in arguments.items() if name not in known}
    return Call(SamplingParams(**given), options)


def _merge(*stops: str | Sequence[str] | None) -> list[str]:
    merged: dict[str, None] = {}
    for stop in stops:
        merged |= dict.fromkeys([stop] if isinstance(stop, str) else stop or [])
    return list(merged)
