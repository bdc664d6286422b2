"""Policies by name: which tokens of the reused chunks are computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from blendrag.errors import ConfigError
from blendrag.policies.base import Attention, Dependence, Deviation, Evidence, Layout, Policy, Selective, Share, best
from blendrag.policies.cacheblend import CacheBlend
from blendrag.policies.cost import require_affordable
from blendrag.policies.exact import Exact
from blendrag.policies.first import First
from blendrag.policies.full import Full
from blendrag.policies.none import NoRecompute
from blendrag.policies.query import Query
from blendrag.policies.registry import POLICIES, check

__all__ = ["POLICIES", "Attention", "CacheBlend", "Dependence", "Deviation", "Evidence", "Exact", "First", "Full",
           "Layout", "NoRecompute", "Policy", "Query", "Selective", "Share", "amend", "best", "explain", "make_policy",
           "require_affordable"]


def make_policy(spec: str | Policy | Mapping[str, Any]) -> Policy:
    """A policy from its name, from `{"policy": name, setting: value}`, or as it is.

    Raises:
        ConfigError: an unknown policy or setting, a value out of range, or a policy class that cannot be used.
    """
    if isinstance(spec, Policy):
        return check(spec)
    if not isinstance(spec, (str, Mapping)):
        raise ConfigError(f"a policy is a name, a mapping or a Policy, not {type(spec).__name__}: choose one of "
                          f"{', '.join(POLICIES)}")
    settings = {"policy": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("policy", None)
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    return _make(POLICIES[name], settings)


def amend(policy: Policy, **settings: Any) -> Policy:
    """The policy with other values of some settings; raises as `make_policy`."""
    check(policy)
    return _make(type(policy), {field.name: getattr(policy, field.name) for field in fields(policy)} | settings)


def explain(error: ValidationError) -> tuple[str, ErrorDetails]:
    """The setting that is wrong and what is wrong with it; of a union, how the form that fits best fails."""
    problem = max(error.errors(), key=lambda problem: len(problem["loc"]))
    names = [str(part) for number, part in enumerate(problem["loc"]) if number == 0 or isinstance(part, int)]
    return ".".join(names), problem


def _make(kind: type[Policy], settings: Mapping[str, Any]) -> Policy:
    known = {field.name for field in fields(kind)}
    if unknown := set(settings) - known:
        raise ConfigError(f"policy {kind.name!r} has no setting {', '.join(sorted(map(str, unknown)))}: "
                          f"it takes {', '.join(sorted(known)) or 'none'}")
    try:
        return check(_adapter(kind).validate_python(settings))
    except ValidationError as error:
        setting, problem = explain(error)
        message = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
        raise ConfigError(f"policy {kind.name!r}: {setting}: {message}") from error
    except ConfigError:
        raise
    except Exception as error:  # of a class of a user's
        raise ConfigError(f"policy {kind.name!r} cannot be made of {settings} ({type(error).__name__}: {error}): mend "
                          "its settings, or the class") from error


@cache
def _adapter(kind: type[Policy]) -> TypeAdapter[Policy]:
    """What checks settings of a class; takes most of a millisecond to make."""
    return TypeAdapter(kind)
