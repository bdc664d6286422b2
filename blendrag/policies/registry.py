"""The policies that there are: the built-in ones, and classes of a user's."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from types import NoneType
from typing import Any, get_args

from blendrag.errors import ConfigError
from blendrag.policies.base import Dependence, Policy, Selective
from blendrag.policies.cacheblend import CacheBlend
from blendrag.policies.exact import Exact
from blendrag.policies.first import First
from blendrag.policies.full import Full
from blendrag.policies.none import NoRecompute
from blendrag.policies.query import Query

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Exact, Full, NoRecompute, First, CacheBlend, Query)}
"""By name; `load` adds to the built-in ones."""

_BUILT_IN = frozenset(POLICIES.values())


def load(paths: Iterable[str]) -> list[type[Policy]]:
    """Imports policy classes, and lets settings and requests name them.

    Args:
        paths: "package.module:Class" of each, from an operator's settings, never from a request.

    Raises:
        ConfigError: a path that leads to no policy class, or a class with another policy's name.
    """
    return [_register(_import(path)) for path in paths]


def is_built_in(policy: Policy) -> bool:
    """Whether every process knows the policy's class."""
    return type(policy) in _BUILT_IN


def check(policy: Policy) -> Policy:
    """The policy, as it is.

    Raises:
        ConfigError: a user's class that has another policy's name or none, a setting that is no plain value, or
            methods that fail or say what no policy can.  They are called on the scheduler's thread later on.
    """
    kind = type(policy)
    if kind in _BUILT_IN:
        return policy
    name = _name(kind)
    if POLICIES.get(name, kind) is not kind:
        raise _clash(kind)
    for field in fields(policy):
        if not _is_plain(value := getattr(policy, field.name)):
            raise ConfigError(f"policy {name!r}: {field.name} is a {type(value).__name__}: a setting is a number, a "
                              "text, a truth value, None, or a tuple of them")
    try:
        depends_on, stronger = policy.depends_on, policy.stronger()
    except Exception as error:
        raise ConfigError(f"policy {name!r}: depends_on or stronger fails ({type(error).__name__}: {error}): mend it, "
                          "or leave it out") from error
    if depends_on not in get_args(Dependence):
        raise ConfigError(f"policy {name!r}: depends_on is {depends_on!r}: choose one of "
                          f"{', '.join(get_args(Dependence))}")
    if not isinstance(stronger, (kind, NoneType)):
        raise ConfigError(f"policy {name!r}: stronger returns a {type(stronger).__name__}: return a {kind.__name__}, "
                          "or None")
    if isinstance(policy, Selective) and policy.reach and depends_on == "entries":
        raise ConfigError(f"policy {name!r}: its reach carries later text into earlier KV: let depends_on be "
                          '"chunks" or "prompt"')
    return policy


def _import(path: str) -> type[Policy]:
    module, _, name = path.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except Exception as error:  # the module's own, too
        raise ConfigError(f"the policy {path!r} cannot be imported ({type(error).__name__}: {error}): write "
                          "package.module:Class, and put the package where Python finds it") from error
    if not isinstance(kind, type) or not issubclass(kind, Policy) or inspect.isabstract(kind):
        raise ConfigError(f"{path!r} is no policy: name a subclass of blendrag.policies.Policy that has a `select`")
    return kind


def _register(kind: type[Policy]) -> type[Policy]:
    other = POLICIES.setdefault(_name(kind), kind)
    if other is not kind:
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise _clash(kind)
        POLICIES[kind.name] = kind  # its module was loaded again
    return kind


def _name(kind: type[Policy]) -> str:
    name: Any = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f'the policy class {kind.__name__} has no name: set `name: ClassVar[str] = "..."` in it')
    return name


def _clash(kind: type[Policy]) -> ConfigError:
    return ConfigError(f"the policy class {kind.__name__} has the name of another policy, {kind.name!r}: give it a "
                       "name of its own")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, NoneType))
