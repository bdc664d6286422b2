"""Conditions on a document's metadata, in the form that FAISS and other vector stores take them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from blendrag.errors import ConfigError

Condition = Callable[[Mapping[str, Any]], bool]
"""Says whether a document with this metadata is wanted."""

Filter = Mapping[str, Any] | Condition
"""A condition, or what it asks of each field: `{"source": "a.md", "year": {"$gte": 2020}}`."""


def condition(wanted: Filter | None) -> Condition | None:
    """The filter as a function of the metadata; None, which wants everything, stays None.

    A mapping asks that every one of its fields has the value it names, is among the values of a list, or fulfils
    operators: `$eq`, `$ne` (`$neq`), `$gt`, `$gte`, `$lt`, `$lte`, `$in`, `$nin`.  `$and` and `$or` take a list of
    mappings, `$not` takes one.  A field that a document lacks counts as None.

    Raises:
        ConfigError: an operator that does not exist, or one that is used in a wrong place.
    """
    if wanted is None or callable(wanted):
        return wanted
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"a filter is a mapping or a function of the metadata, not {type(wanted).__name__}")
    checks = [_clause(name, value) for name, value in wanted.items()]
    return lambda metadata: all(check(metadata) for check in checks)


def _clause(name: str, value: Any) -> Condition:
    if name in _GROUPS:
        group = [condition(part) for part in (value if name != "$not" else [value])]
        parts = [part for part in group if part is not None]
        return lambda metadata: _GROUPS[name](part(metadata) for part in parts)
    if name.startswith("$"):
        raise ConfigError(f"{name!r} is not an operator for whole filters: use {', '.join(_GROUPS)}")
    if isinstance(value, Mapping):
        checks = [_check(operation, operand) for operation, operand in value.items()]
        return lambda metadata: all(check(metadata.get(name)) for check in checks)
    if isinstance(value, (list, tuple, set, frozenset)):
        return lambda metadata: metadata.get(name) in value
    return lambda metadata: bool(metadata.get(name) == value)


def _check(operation: str, operand: Any) -> Callable[[Any], bool]:
    if operation not in _OPERATORS:
        raise ConfigError(f"{operation!r} is not an operator for fields: use {', '.join(_OPERATORS)}")

    def check(value: Any) -> bool:
        try:
            return bool(_OPERATORS[operation](value, operand))
        except TypeError:  # values that have no order, None above all
            return False

    return check


def _among(value: Any, values: Collection[Any]) -> bool:
    return value in values


_GROUPS: dict[str, Callable[[Any], bool]] = {"$and": all, "$or": any, "$not": lambda found: not any(found)}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq, "$ne": operator.ne, "$neq": operator.ne, "$gt": operator.gt, "$gte": operator.ge,
    "$lt": operator.lt, "$lte": operator.le, "$in": _among, "$nin": lambda value, values: not _among(value, values),
}
