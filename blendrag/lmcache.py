"""Reads LMCache's YAML settings for blending, so that a deployment can move over without rewriting them.

Key names and meanings: LMCache 0.5.6, `lmcache/v1/config.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from blendrag.errors import ConfigError

logger = logging.getLogger(__name__)

_GIB = 2**30


def translate(settings: dict[str, Any]) -> dict[str, Any]:
    """`BlendConfig` settings from LMCache's; each key that has no counterpart is named in one warning.

    Raises:
        ConfigError: a value that LMCache itself would refuse.
    """
    settings = dict(settings)
    result: dict[str, Any] = {"policy": "cacheblend", "policy_settings": {"deviation": "k"},
                              "delimiter": settings.pop("blend_special_str", " # # ")}
    if (ratios := _numbers(settings, "blend_recompute_ratios")) is not None:
        result["ratio"] = _one_or_all(ratios)
    if (layers := _numbers(settings, "blend_check_layers")) is not None:
        if wrong := [layer for layer in layers if not layer.is_integer()]:
            raise ConfigError(f"LMCache setting blend_check_layers: {wrong[0]} is no layer: give a whole number")
        result["policy_settings"]["check_layers"] = _one_or_all([int(layer) for layer in layers])
    if (tokens := settings.pop("blend_min_tokens", None)) is not None:
        result["min_chunk_tokens"] = tokens
    if settings.pop("local_cpu", True):
        size, *more = _numbers(settings, "max_local_cpu_size") or [5.0]
        if more:
            raise ConfigError("LMCache setting max_local_cpu_size: give one number of GiB")
        result["ram_bytes"] = int(size * _GIB)
    if disk := settings.pop("local_disk", None):
        result["store_path"] = str(disk).removeprefix("file://")  # "file://chunks/" is a relative path to LMCache
    settings.pop("enable_blending", None)
    if settings:
        logger.warning("LMCache settings without a counterpart in blendrag, ignored: %s", ", ".join(sorted(settings)))
    return result


def _numbers(settings: dict[str, Any], key: str) -> list[float] | None:
    value = settings.pop(key, None)
    if value is None:
        return None
    if isinstance(value, str):
        value = value.split(",")
    values = value if isinstance(value, list) else [value]
    try:
        numbers = [float(v) for v in values if not isinstance(v, bool)]
    except (TypeError, ValueError):
        numbers = []
    if not numbers:
        raise ConfigError(f"LMCache setting {key}: {value!r} is no list of numbers")
    return numbers


def _one_or_all(numbers: list[Any]) -> Any:
    return numbers[0] if len(numbers) == 1 else numbers
