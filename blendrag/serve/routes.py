"""The routes of vLLM's server that read prompts, and what each of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from blendrag.serve import texts


class Documents(Enum):
    """What the field `documents` may hold."""

    TEXTS = auto()
    """Texts alone: the server finds them in the prompt or puts them there."""
    TEMPLATE = auto()
    """Texts, or mappings that vLLM hands to the chat template."""
    TEMPLATE_KWARGS = auto()
    """Likewise; vLLM knows the field only as `chat_template_kwargs["documents"]`."""
    OWN = auto()
    """The API has a field of this name, which stays."""


@dataclass(frozen=True)
class Route:
    """A route that reads a prompt.

    Attributes:
        read: where its texts are.
        documents: what its field `documents` may hold.
        blend_params: its requests carry `kv_transfer_params`; chunks are found by matching alone elsewhere.
        generates: its requests reach the engine.
        renders: its answer is a request that a client may send to another route.
        salted: its requests take a `cache_salt`, without which no tenant may use it.
    """

    read: texts.Reader
    documents: Documents = Documents.TEMPLATE
    blend_params: bool = True
    generates: bool = True
    renders: bool = False
    salted: bool = True


_CHAT = Route(texts.chat)
_COMPLETION = Route(texts.completion, Documents.TEXTS)
_RESPONSES = Route(texts.responses, Documents.TEXTS)
_MESSAGES = Route(texts.anthropic, Documents.TEMPLATE_KWARGS)
_COHERE = Route(texts.chat, Documents.OWN, salted=False)


def _rendering(route: Route) -> Route:
    return Route(route.read, route.documents, generates=False, renders=True, salted=route.salted)


ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/batch": _CHAT,
    "/v1/chat/completions/render": _rendering(_CHAT),
    "/v1/completions": _COMPLETION,
    "/v1/completions/render": _rendering(_COMPLETION),
    "/v1/responses": _RESPONSES,
    "/v1/responses/render": _rendering(_RESPONSES),
    "/v1/messages": _MESSAGES,
    "/v1/messages/render": _rendering(_MESSAGES),
    "/v1/messages/count_tokens": Route(texts.anthropic, Documents.TEMPLATE_KWARGS, blend_params=False, generates=False),
    "/cohere/v2/chat": _COHERE,
    "/cohere/v2/chat/render": _rendering(_COHERE),
    "/tokenize": Route(texts.chat_or_completion, Documents.TEMPLATE_KWARGS, blend_params=False, generates=False),
    "/generative_scoring": Route(texts.scoring, Documents.TEXTS, blend_params=False),
    "/v1/systemone": Route(texts.decisions, Documents.TEXTS, blend_params=False),
    "/inference/v1/generate": Route(texts.token_ids, Documents.TEXTS),
    "/invocations": Route(texts.chat_or_completion),
}
"""By path; each takes POST."""
