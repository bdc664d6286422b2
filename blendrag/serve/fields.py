"""The fields of a request's body that reach vLLM's engine beside the prompt: what clients may not send is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from blendrag.blend_params import BLEND_PARAMS_KEY, FIELD, check_client_params, kind_of, read_blend_params
from blendrag.config import BlendConfig
from blendrag.errors import RequestError
from blendrag.runtime.planning.scope import TENANT_TAG
from blendrag.serve.body import NamedDocument

_TRANSFER = "kv_transfer_params"


def check_fields(body: dict[str, Any], config: BlendConfig) -> None:
    """Refuses what would be ignored, or fail with status 500, behind vLLM's own validation.

    Raises:
        RequestError: a field that makes no sense, or that only the server's operator may set.
    """
    prompt_tokens = _prompt_tokens(body)
    for holder, path in _holders(body):
        transfer = holder.get(_TRANSFER)
        if transfer is None:
            continue
        field = path + _TRANSFER
        if not isinstance(transfer, dict):
            raise RequestError(field, f"{field} is an object, not {kind_of(transfer)}: send "
                               f'{{"{BLEND_PARAMS_KEY}": ...}}')
        _check_sendable(transfer, field)
        if BLEND_PARAMS_KEY in transfer:
            check_client_params(transfer[BLEND_PARAMS_KEY], config, prompt_tokens)
    _check_extra_args(body.get("vllm_xargs"), "vllm_xargs")
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise RequestError("cache_salt", f"cache_salt is a text that is not empty, not {kind_of(salt)}: send a "
                           "secret of your own, or leave it out")
    _check_sendable(salt, "cache_salt")
    if salt.startswith(TENANT_TAG):
        raise RequestError("cache_salt", f"a cache_salt may not begin with {TENANT_TAG!r}, which the server sets: "
                           "choose another one")


def named_in_params(body: dict[str, Any]) -> list[NamedDocument]:
    """The documents that `kv_transfer_params` name."""
    return [NamedDocument(text, f"{FIELD}.documents[{number}]")
            for holder, _ in _holders(body) if (params := _params(holder))
            for number, text in enumerate(params.get("documents") or []) if text.strip()]


def set_documents(body: dict[str, Any], documents: Sequence[NamedDocument],
                  ids: Callable[[str], list[int]] | None) -> bool:
    """Names documents to the engine, unless the request shall not be blended.

    Args:
        documents: beside those that `kv_transfer_params` name.
        ids: token ids of a text; None: documents stay texts.

    Returns:
        Whether the body was changed.
    """
    changed = False
    for number, (holder, _) in enumerate(_holders(body)):
        transfer = holder.get(_TRANSFER) or {}
        params = transfer.get(BLEND_PARAMS_KEY)
        if params is False:
            continue
        params = dict(params) if isinstance(params, dict) else {}
        texts = list(dict.fromkeys([*(params.pop("documents", None) or []),
                                    *(document.text for document in documents if number == 0)]))
        if texts:
            params |= {"documents": texts} if ids is None else {"document_ids": [ids(text) for text in texts]}
            holder[_TRANSFER] = transfer | {BLEND_PARAMS_KEY: params}
            changed = True
    return changed


def _holders(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where `kv_transfer_params` may be: in the body, or, in a rendered request, beside its sampling parameters."""
    yield body, ""
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    if isinstance(extra, dict) and _TRANSFER in extra:
        yield extra, "sampling_params.extra_args."


def _params(holder: dict[str, Any]) -> dict[str, Any] | None:
    transfer = holder.get(_TRANSFER)
    params = transfer.get(BLEND_PARAMS_KEY) if isinstance(transfer, dict) else None
    return params if isinstance(params, dict) and read_blend_params(params) else None


def _check_extra_args(extra: Any, field: str) -> None:
    if extra is None:
        return
    if not isinstance(extra, dict):
        raise RequestError(field, f"{field} is an object, not {kind_of(extra)}: send names and values")
    if _TRANSFER in extra:
        raise RequestError(field, f"{field} may not hold {_TRANSFER}: send it as a field of its own")
    _check_sendable(extra, field)


def _check_sendable(value: Any, field: str) -> None:
    """vLLM sends these fields to its engine's process, and answers with status 500 where that fails."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        raise RequestError(field, f"{field} holds half of a surrogate pair, which is no character: decode the text "
                           'with errors="replace"') from error
    except (OverflowError, RecursionError) as error:
        raise RequestError(field, f"{field} holds a number of more than 64 bits or is nested too deeply: send less") \
            from error


def _prompt_tokens(body: dict[str, Any]) -> int | None:
    """Length of the longest prompt, where prompts came as token ids."""
    transfer = body.get(_TRANSFER)
    ids = body.get("token_ids") or (transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None)
    ids = ids or body.get("prompt")
    if not isinstance(ids, list) or not ids or isinstance(ids[0], str):
        return None
    many = ids if isinstance(ids[0], list) else [ids]
    return max(len(prompt) if isinstance(prompt, list) else 0 for prompt in many)
