"""The tenants of a server: who may send requests, which namespace their chunks live in, and how much they may use."""

from __future__ import annotations

import hashlib
import logging
import secrets
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from blendrag.errors import ConfigError

logger = logging.getLogger(__name__)

_Key = Annotated[str, Field(min_length=16)]
_Digest = Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]


class Tenant(BaseModel):
    """One tenant.

    Attributes:
        name: for the operator's logs.
        namespace: its chunks are found by its own requests only; `blendrag index --namespace` fills it.
        api_keys: that its clients send, 16 characters at least.
        api_key_sha256: SHA-256 of such keys, in hexadecimal, for a file that holds no secret.
        disk_bytes: budget of its chunks in the disk tier; None: what the store has.
        requests_per_minute: that a server process takes; None: any number.
        concurrent_requests: that a server process answers at the same time; None: any number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1)
    # A part of the `cache_salt` of its requests, of which vLLM takes 128 characters without "@", "/" and "\".
    namespace: str = Field(pattern="^[A-Za-z0-9._-]{1,64}$")
    api_keys: tuple[_Key, ...] = Field((), repr=False)
    api_key_sha256: tuple[_Digest, ...] = Field((), repr=False)
    disk_bytes: ByteSize | None = None
    requests_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    concurrent_requests: int | None = Field(None, ge=1)

    @field_validator("api_keys", "api_key_sha256", mode="before")
    @classmethod
    def _one_or_many(cls, keys: Any) -> Any:
        return [keys] if isinstance(keys, str) else keys

    @model_validator(mode="after")
    def _has_a_key(self) -> Tenant:
        if not self.api_keys and not self.api_key_sha256:
            raise ValueError("it has neither api_keys nor api_key_sha256: give it one")
        return self

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each of its keys."""
        return (*(hashlib.sha256(key.encode()).digest() for key in self.api_keys),
                *map(bytes.fromhex, self.api_key_sha256))


def load_tenants(path: str | Path) -> tuple[Tenant, ...]:
    """The tenants in a YAML file, a list of mappings of the fields of `Tenant`.

    Raises:
        ConfigError: the file cannot be read, other users may read its keys or change it, a field is wrong, or two
            tenants share a name, a namespace or a key.
    """
    path = Path(path).expanduser()
    try:
        mode = path.stat().st_mode
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # An excerpt of the file, which a YAML error quotes, could hold a key.
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise ConfigError(f"{path} cannot be read as YAML ({reason}): check the path and the syntax") from None
    if not isinstance(content, list) or not content or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(f"{path} holds no list of tenants: write one `- name: ...` with namespace and api_keys each")
    tenants = tuple(_tenant(path, number, entry) for number, entry in enumerate(content))
    _check_mode(path, mode, any(tenant.api_keys for tenant in tenants))
    for field, values in (("name", [tenant.name for tenant in tenants]),
                          ("namespace", [tenant.namespace for tenant in tenants])):
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            raise ConfigError(f"{path}: two tenants have the {field} {twice[0]!r}: give each its own")
    if any(count > 1 for count in Counter(digest for tenant in tenants for digest in tenant.digests).values()):
        raise ConfigError(f"{path}: an API key occurs twice: give each tenant its own")
    return tenants


class Keys:
    """Finds the tenant of an API key in a time that depends on no key."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._digests = [(digest, tenant) for tenant in tenants for digest in tenant.digests]

    def find(self, key: str) -> Tenant | None:
        """The tenant whose key it is, or None."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        owner = None
        for known, tenant in self._digests:
            if secrets.compare_digest(digest, known):
                owner = tenant
        return owner


def _tenant(path: Path, number: int, entry: dict[str, Any]) -> Tenant:
    try:
        return Tenant.model_validate(entry)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"there is no such field: choose from {', '.join(Tenant.model_fields)}"
        raise ConfigError(f"{path}: tenant {number}{f', {field}' if field else ''}: {message}") from None


def _check_mode(path: Path, mode: int, holds_keys: bool) -> None:
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} can be changed by other users of this machine: chmod 600 it")
    if mode & stat.S_IROTH:
        if holds_keys:
            raise ConfigError(f"{path} holds API keys and can be read by all users of this machine: chmod 600 it, or "
                              "write api_key_sha256 instead")
        logger.warning("%s can be read by all users of this machine: chmod 600 it", path)
