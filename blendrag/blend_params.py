"""What a request says about blending: `kv_transfer_params["blend"]`."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError, RequestError
from blendrag.policies import Policy

BLEND_PARAMS_KEY = "blend"
"""Key of `kv_transfer_params` under which a request's `BlendParams` travel in and its statistics travel out.

In: the fields of `BlendParams`, or False for a plain full prefill.  Out: `BlendStats.to_dict()`.
"""

FIELD = f"kv_transfer_params.{BLEND_PARAMS_KEY}"
_INTERNAL = "document_ids"
_Index = Annotated[int, Field(ge=0, lt=2**31)]


class BlendParams(BaseModel):
    """Chunks in a request's prompt, and how to blend them.

    Attributes:
        spans: `[start, end)` of chunks in the prompt's token ids.
        documents: texts of chunks that stand somewhere in the prompt.
        document_ids: the token ids of further such chunks; set by a server's middleware only.  Numbers that are no
            token ids are met where they are located.
        policy: settings for this request instead of the engine's, as `BlendConfig.make_policy` takes them; from an
            engine in this process, which has checked it, the policy itself.
        explain: ask for `BlendStats.map`.
        always: blend whatever is stored, also where a full prefill is estimated to be as quick.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    spans: list[Annotated[list[_Index], Field(min_length=2, max_length=2)]] = []
    documents: list[str] = []
    document_ids: list[InstanceOf[list[Any]]] = []  # a look at each number would take longer than all the rest
    policy: dict[str, Any] | InstanceOf[Policy] | None = None
    explain: bool = False
    always: bool = False


def read_blend_params(value: Any) -> BlendParams | Literal[False]:
    """The value under `BLEND_PARAMS_KEY` as it is to be understood; False for a request that shall not be blended.

    Raises:
        RequestError: it is neither an object of the fields of `BlendParams` nor a truth value.
    """
    if value is False:
        return False
    if value is None or value is True:
        return BlendParams()
    if not isinstance(value, dict):
        raise RequestError(FIELD, f"{FIELD} is an object or false, not {kind_of(value)}: send "
                           '{"policy": {"ratio": 0.3}} for instance')
    try:
        return BlendParams.model_validate({name: field for name, field in value.items() if field is not None})
    except ValidationError as error:
        raise _explained(error) from error


def check_client_params(value: Any, config: BlendConfig, prompt_tokens: int | None = None) -> None:
    """Refuses what a client may not send under `BLEND_PARAMS_KEY`.

    Args:
        prompt_tokens: length of the prompt, where it came as token ids.

    Raises:
        RequestError: what it names makes no sense, or the operator does not allow it.
    """
    # First, as reading them takes as long as there are many.
    names = [value.get(name) for name in ("spans", "documents")] if isinstance(value, dict) else []
    count = sum(len(named) for named in names if isinstance(named, list))
    if count > config.max_documents:
        raise RequestError(FIELD, f"{FIELD} names {count} documents and spans: send {config.max_documents} at most")
    params = read_blend_params(value)
    if not params:
        return
    if params.document_ids:
        raise RequestError(f"{FIELD}.{_INTERNAL}", f"{FIELD}.{_INTERNAL} is set by the server: send documents as "
                           "texts, or spans")
    _check_spans(params.spans, prompt_tokens)
    _check_policy(params.policy, config)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _check_spans(spans: list[list[int]], prompt_tokens: int | None) -> None:
    field, last = f"{FIELD}.spans", 0
    for start, end in sorted(spans):
        if start >= end:
            raise RequestError(field, f"the span [{start}, {end}] is empty: send [start, end] with the end behind the "
                               "last token")
        if start < last:
            raise RequestError(field, f"the span [{start}, {end}] overlaps another one: send spans side by side")
        if prompt_tokens is not None and end > prompt_tokens:
            raise RequestError(field, f"the span [{start}, {end}] is outside of the prompt of {prompt_tokens} tokens: "
                               "count tokens from the prompt's start")
        last = end


def _check_policy(policy: dict[str, Any] | Policy | None, config: BlendConfig) -> None:
    if not policy or isinstance(policy, Policy):
        return
    field = f"{FIELD}.policy"
    if not config.client_policy:
        raise RequestError(field, "this server lets no request choose its policy: leave policy out")
    try:
        config.make_policy(**policy)
    except (ConfigError, TypeError) as error:
        raise RequestError(field, f"{field}: {error}") from error


def _explained(error: ValidationError) -> RequestError:
    """The first thing that is wrong, in a sentence with its remedy."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    field = f"{FIELD}.{name}"
    if problem["type"] == "extra_forbidden":
        fields = [name for name in BlendParams.model_fields if name != _INTERNAL]
        close = difflib.get_close_matches(name, fields, 1)
        remedy = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(fields)}"
        return RequestError(field, f"{FIELD} has no field {name[:40]!r}: {remedy}")
    forms = {"spans": "a list of [start, end], counted in tokens", "documents": "a list of texts",
             "policy": 'an object of settings: send {"policy": "full"} or {"ratio": 0.3} for instance',
             "explain": "true or false", "always": "true or false",
             _INTERNAL: "set by the server: send documents as texts"}
    return RequestError(field, f"{field} is {forms[name]}")
