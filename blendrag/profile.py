"""Profiles: what `blendrag calibrate` found for a model, kept in the store's folder, where engines look for it."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError
from blendrag.policies import Exact, Policy, make_policy
from blendrag.private import create, read
from blendrag.store.problems import explain, make_folder, unwritable

logger = logging.getLogger(__name__)

_FOLDER = "profiles"
_LONGEST = 2**24


@dataclass(frozen=True)
class Profile:
    """The cheapest policy that met a target, or that there is none.

    Attributes:
        fingerprint: of the model that it was measured with; see `BlendEngine.fingerprint`.
        model: its name, for people.
        policy: of requests that name none; None where nothing met the target: then engines reuse KV only where that
            is exact.
        target: what had to be met, as `blendrag.calibrate.Target` has it.
        questions: how many it was measured on.
        made: when, ISO 8601.
        sparse_attention: `BlendConfig.sparse_attention` of the measurement.
        measured: rows, KL and so on of the policy, on questions that it was not chosen by.
        curve: all that was measured, the cheapest first.
        advice: what may help where nothing met the target.
    """

    fingerprint: str
    model: str
    policy: Policy | None
    target: dict[str, float]
    questions: int
    made: str
    sparse_attention: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"policy": self.policy.settings() if self.policy is not None else None}

    def save(self, store: Path) -> Path:
        """Writes it into a store's folder, whole or not at all, in place of an earlier one; returns the file.

        Raises:
            StoreError: the folder cannot be written.
        """
        path = profile_path(store, self.fingerprint)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        make_room(store)
        try:
            content = json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"
            with create(part) as file:
                file.write(content.encode("utf-8", "replace"))
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise explain(error, store) from error
        return path


def make_room(store: Path) -> None:
    """Makes the folder of profiles; StoreError where it cannot be written to."""
    make_folder(store / _FOLDER)
    if not os.access(store / _FOLDER, os.W_OK | os.X_OK):
        raise unwritable(store / _FOLDER)


def profile_path(store: Path, fingerprint: str) -> Path:
    """Where a model's profile is, or would be."""
    return store / _FOLDER / f"{fingerprint}.json"


def load_profile(store: Path, fingerprint: str) -> Profile | None:
    """A model's profile; None where it was not calibrated with this store.

    Raises:
        ConfigError: the file cannot be read, or is no profile.
    """
    path = profile_path(store, fingerprint)
    try:
        content = json.loads(read(path, _LONGEST))
        if not isinstance(content, Mapping):
            raise TypeError("it holds no object")
        values = {field.name: content[field.name] for field in fields(Profile) if field.name in content}
        if content["fingerprint"] != fingerprint:
            raise ValueError(f"it is of another model, {content.get('model')}")
        if content["policy"] is not None:
            values["policy"] = make_policy(content["policy"])
        return Profile(**values)
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError, TypeError, RecursionError, ConfigError) as error:
        raise ConfigError(f"the profile {path} cannot be used ({error}): run `blendrag calibrate` again, or delete it"
                          ) from error


def default_policy(config: BlendConfig, fingerprint: str) -> tuple[Policy, bool]:
    """The policy of requests that name none, and whether it comes from a profile.

    Settings win over the profile.  One that is there and cannot be read may say that nothing met the target, and one
    that was measured with another attention says nothing of this one: only what is exact is reused then.
    """
    if not config.uses_profile or config.store_path is None:
        return config.make_policy(), False
    try:
        profile = load_profile(config.store_path, fingerprint)
    except ConfigError as error:
        logger.warning("%s; until then only exact KV is reused", error)
        return Exact(), True
    if profile is None:
        return config.make_policy(), False
    if profile.policy is not None and profile.sparse_attention != config.sparse_attention:
        logger.warning("calibration was done with sparse_attention=%s, not %s: only exact KV is reused; run `blendrag "
                       "calibrate` again, with these settings", profile.sparse_attention, config.sparse_attention)
        return Exact(), True
    if profile.policy is None:
        logger.warning("calibration found no setting for %s that meets %s: only exact KV is reused", profile.model,
                       profile.target)
        return Exact(), True
    return profile.policy, True
