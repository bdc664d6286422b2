"""Every setting of blendrag in one place: keyword arguments, `BLENDRAG_*` variables, or a YAML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import yaml
from pydantic import (
    ByteSize,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from blendrag.errors import ConfigError
from blendrag.guard import QualityGuard
from blendrag.policies import POLICIES, Policy, Share, amend, explain, make_policy
from blendrag.policies.registry import is_built_in, load
from blendrag.store.keys import SCOPE_SEPARATOR

DELIMITER = "\ue000"
"""The delimiter of blendrag before pairs of marks: for texts that hold it, and for `BlendConfig(delimiter=...)`."""


_POLICY = {"policy", "ratio", "policy_settings"}
"""The settings that say what a profile would say."""


class BlendConfig(BaseSettings):
    """Settings of an engine, its policy and its chunk store.

    Keyword arguments win over environment variables (`BLENDRAG_POLICY`, `BLENDRAG_RATIO`, ...),
    which win over the defaults.  Sizes take numbers of bytes or text such as "4GiB".

    Raises:
        ConfigError: an unknown setting, or a value out of range.
    """

    model_config = SettingsConfigDict(env_prefix="BLENDRAG_", env_ignore_empty=True, extra="forbid", frozen=True)

    policy: str = Field("query", description="which tokens are recomputed: " + ", ".join(POLICIES))
    ratio: Share | tuple[Share, ...] | None = Field(
        None, description="share of the reused tokens to recompute; or one for each of cacheblend's check_layers")
    policy_settings: dict[str, Any] = Field({}, description="further settings of the policy, by name")
    policies: tuple[str, ...] = Field(
        (), description="policy classes of your own that policy and requests may name, as package.module:Class; all "
        "processes of the engine import them")
    profile: bool = Field(True, description="use the policy that `blendrag calibrate` found for the model and left in "
                          "the store's folder, unless policy, ratio or policy_settings are set")
    sparse_attention: int | None = Field(
        None, ge=0, description="recomputed rows of chunks attend to the prefix, their chunk, recent tokens, and this "
        "many tokens in the blocks that score best; none: to everything")

    delimiter: str | None = Field(
        None, min_length=1, description="stands between chunks in prompt text, as in LMCache; none: a pair of marks "
        "stands around each")
    keep_delimiter: bool = Field(False, description="leave the delimiter in the prompt, as LMCache does")
    min_chunk_tokens: int = Field(16, ge=1, description="shorter chunks are computed, not stored")

    match: bool = Field(True, description="find stored chunks in prompts that do not mark them")
    populate: Literal["never", "on_miss"] = Field(
        "never", description="on_miss: marked chunks that are not stored are encoded after their request's first token")

    blend: Literal["auto", "always"] = Field(
        "auto", description="auto: a request is left to vLLM's full prefill where that is estimated to be faster, from "
        "what is measured at start-up; always: whatever is stored is blended, and nothing is measured")
    conversations: Literal["continue", "anew"] = Field(
        "continue", description="continue: a prompt that begins as an earlier one uses its blended blocks while vLLM's "
        "prefix cache holds them; anew: only exact blocks, and those of the same prompt")

    quality_guard: QualityGuard | None = Field(
        None, description="audits a share of the requests, and lets blending give way where answers suffer")

    store_path: Path | None = Field(None, description="folder of the disk tier; none: host RAM only")
    ram_bytes: ByteSize = Field(ByteSize(4 * 2**30), description="budget of the host-RAM tier")
    gpu_bytes: ByteSize | None = Field(
        None, description="budget of the tier on the GPU; none: half of what vLLM leaves free, 8 GiB at most")
    disk_bytes: ByteSize | None = Field(None, description="budget of the disk tier; none: no limit")
    namespace: str = Field("default", min_length=1, description="chunks are shared within a namespace only, and there "
                           "only among requests of one cache_salt")
    tenants: Path | None = Field(None, description="server: a YAML file of tenants, with their API keys and "
                                 "namespaces; requests of no tenant are refused")

    client_policy: bool = Field(True, description="server: requests may choose policy, ratio and further settings")
    statistics: Literal["chunks", "totals", "none"] = Field(
        "chunks", description="server: what answers say of reuse: each chunk, sums alone, or nothing, cached_tokens "
        "included")
    max_documents: int = Field(1024, ge=0, description="documents and spans that one request may name")
    pass_step_tokens: int | None = Field(
        None, ge=1, description="rows of blend passes in a step beside other requests, at most; none: as many as "
        "vLLM would prefill of a prompt (max_num_batched_tokens)")
    populate_step_tokens: int = Field(512, ge=16, description="chunk tokens that are encoded in a step beside decoding "
                                      "requests, at most; fewer where they would take longer than 0.1 s")
    populate_queue_tokens: int = Field(65_536, ge=0, description="chunk tokens that may wait to be encoded; the oldest "
                                       "leave first")

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error
        except SettingsError as error:
            raise ConfigError(f"{error}: write it as JSON") from error

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
                                   *_: PydanticBaseSettingsSource, **__: PydanticBaseSettingsSource,
                                   ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords replace variables of the same name; pydantic would merge mappings."""
        return init_settings, _Environment(settings_cls, set(init_settings()))

    @field_validator("store_path", "tenants")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return path.expanduser() if path else None

    @field_validator("namespace")
    @classmethod
    def _namespace_is_plain(cls, namespace: str) -> str:
        if SCOPE_SEPARATOR in namespace or not namespace.isprintable():
            raise ValueError(f"it holds {SCOPE_SEPARATOR!r} or a control character: use letters, digits, '-', '_', '.' "
                             "or '/'")
        return namespace

    @field_validator("quality_guard", mode="before")
    @classmethod
    def _read_guard(cls, guard: Any) -> Any:
        """On a command line it is JSON.  True is a guard with its defaults, false none."""
        try:
            given = json.loads(guard) if isinstance(guard, str) else guard
        except json.JSONDecodeError as error:
            raise ValueError(f'it is no JSON ({error}): write {{"share": 0.02}} for instance') from error
        if isinstance(given, bool):
            return QualityGuard() if given else None
        return given

    @field_validator("policies")
    @classmethod
    def _load_policies(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        try:
            load(paths)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return paths

    @field_validator("policy_settings")
    @classmethod
    def _policy_has_its_own_setting(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if "policy" in settings:
            raise ValueError("'policy' is a setting of its own: set policy instead")
        return settings

    @model_validator(mode="after")
    def _policy_exists(self) -> BlendConfig:
        try:
            self.make_policy()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _only_delimiters_stay(self) -> BlendConfig:
        if self.keep_delimiter and self.delimiter is None:
            raise ValueError("keep_delimiter needs a delimiter that stays in the prompt: set delimiter, too")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_nobody_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is made of a dump uses a profile if this does."""
        return {name: value for name, value in dump(self).items() if name not in _POLICY - self.model_fields_set}

    @property
    def uses_profile(self) -> bool:
        """Whether requests that name no policy get that of the model's profile, where it has one."""
        return self.profile and not _POLICY.intersection(self.model_fields_set)

    def embedded(self) -> BlendConfig:
        """These settings for an engine in a program, whose callers are its operators: what restrains clients is off."""
        return self.model_copy(update={"tenants": None, "client_policy": True, "statistics": "chunks"})

    def make_policy(self, **overrides: Any) -> Policy:
        """The policy these settings describe.

        Args:
            overrides: per-request `policy` (name, mapping or `Policy`), `ratio`, and further
                settings of the policy.  A request that names another policy starts from that
                policy's defaults; a `ratio` that is one number is kept where both policies have one.

        Raises:
            ConfigError: an unknown policy or setting.
        """
        chosen = overrides.pop("policy", None)
        if isinstance(chosen, Policy):
            given = {key: value for key, value in overrides.items() if value is not None}
            return amend(chosen, **given) if given else make_policy(chosen)
        if not isinstance(chosen, (str, Mapping, NoneType)):
            return make_policy(chosen)  # refuses it
        named = {"policy": chosen} if isinstance(chosen, str) else dict(chosen or {})
        name = named.get("policy", self.policy)
        settings = dict(self.policy_settings) if name == self.policy else {}
        kind = POLICIES.get(name) if isinstance(name, str) else None
        if kind and "ratio" in kind.__dataclass_fields__ and (
                isinstance(self.ratio, float) or (self.ratio is not None and name == self.policy)):
            settings["ratio"] = self.ratio
        settings |= named | {key: value for key, value in overrides.items() if value is not None}
        return make_policy(settings | {"policy": name})

    def check_travels(self, policy: Policy) -> None:
        """Makes sure that the other processes of an engine with these settings know a policy's class.

        Raises:
            ConfigError: they do not.
        """
        if not is_built_in(policy) and type(policy) not in load(self.policies):
            kind = type(policy)
            raise ConfigError(f"the engine's processes do not know the policy class {kind.__name__}: name it in the "
                              f"setting policies, as {kind.__module__}:{kind.__qualname__}")

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> BlendConfig:
        """Settings from a YAML mapping of the field names; `overrides` win over the file."""
        return cls(**(read_yaml(path) | overrides))

    @classmethod
    def from_lmcache(cls, path: str | Path, **overrides: Any) -> BlendConfig:
        """Settings from an LMCache YAML file; see `blendrag.lmcache`."""
        from blendrag.lmcache import translate

        return cls(**(translate(read_yaml(path)) | overrides))


class _Environment(EnvSettingsSource):
    """The variables that no keyword replaces."""

    def __init__(self, settings_cls: type[BaseSettings], replaced: set[str]) -> None:
        super().__init__(settings_cls)
        self._replaced = replaced

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name not in self._replaced}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigError where there is none."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML ({error}): check the path and the syntax") from error
    if not isinstance(content or {}, dict) or not all(isinstance(name, str) for name in content or {}):
        raise ConfigError(f"{path} holds no mapping of settings: write one `name: value` a line")
    return content or {}


def _explain(error: ValidationError) -> str:
    name, problem = explain(error)
    if problem["type"] == "extra_forbidden":
        return f"there is no setting {name!r}: choose from {', '.join(BlendConfig.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{name}: {message} (got {problem['input']!r})" if name else message
