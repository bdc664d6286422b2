"""Policies by name: which tokens of the reused chunks are computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from blendrag.errors import ConfigError
from blendrag.policies.base import Attention, Deviation, Evidence, Layout, Policy, Selective, Share
from blendrag.policies.cacheblend import CacheBlend
from blendrag.policies.exact import Exact
from blendrag.policies.first import First
from blendrag.policies.full import Full
from blendrag.policies.none import NoRecompute
from blendrag.policies.query import Query

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Exact, Full, NoRecompute, First, CacheBlend, Query)}

__all__ = ["POLICIES", "Attention", "CacheBlend", "Deviation", "Evidence", "Exact", "First", "Full", "Layout",
           "NoRecompute", "Policy", "Query", "Selective", "Share", "explain", "make_policy"]


def make_policy(spec: str | Policy | Mapping[str, Any]) -> Policy:
    """A policy from its name, from `{"policy": name, setting: value}`, or as it is.

    Raises:
        ConfigError: an unknown policy or setting, or a value out of range.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, (str, Mapping)):
        raise ConfigError(f"a policy is a name, a mapping or a Policy, not {type(spec).__name__}: choose one of "
                          f"{', '.join(POLICIES)}")
    settings = {"policy": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("policy", None)
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    kind = POLICIES[name]
    known = {field.name for field in fields(kind)}
    if unknown := set(settings) - known:
        raise ConfigError(f"policy {name!r} has no setting {', '.join(sorted(map(str, unknown)))}: "
                          f"it takes {', '.join(sorted(known)) or 'none'}")
    try:
        policy: Policy = TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        setting, problem = explain(error)
        raise ConfigError(f"policy {name!r}: {setting}: {problem['msg'][0].lower()}{problem['msg'][1:]}") from error
    return policy


def explain(error: ValidationError) -> tuple[str, ErrorDetails]:
    """The setting that is wrong and what is wrong with it; of a union, how the form that fits best fails."""
    problem = max(error.errors(), key=lambda problem: len(problem["loc"]))
    names = [str(part) for number, part in enumerate(problem["loc"]) if number == 0 or isinstance(part, int)]
    return ".".join(names), problem
