"""`BlendSynthesizer`: one prompt with whole nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE

from blendrag.errors import ConfigError, PromptError
from llama_index.response_synthesizers.blendrag.packing import PackedText
from llama_index.response_synthesizers.blendrag.prompt_helper import BlendPromptHelper, blend_llm

_log = logging.getLogger(__name__)

DROPPED = "dropped_nodes"
"""Key in a response's metadata: ids of the nodes that did not fit into the prompt."""


class BlendSynthesizer(BaseSynthesizer):
    """Answers in one call, from as many whole nodes as fit, in retrieval order.

    Where the nodes are more than a prompt has room for, those with the lowest scores are left out (the last ones, where
    there are no scores), and so is a node that is longer than that by itself.  This is never silent:
    `response.metadata["dropped_nodes"]` holds their ids, `response.source_nodes` the others, and a warning goes to the
    log.  To have every node read, in as many calls as it takes, use a mode of LlamaIndex's with the same packing:
    `get_response_synthesizer(llm=llm, prompt_helper=BlendPromptHelper(llm), response_mode="compact")`.

    Example:
        >>> synthesizer = BlendSynthesizer(llm=llm)
        >>> engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=20)

    Args:
        llm: a `BlendLLM`, alone or as a structured LLM; `Settings.llm` where None.
        text_qa_template: with the variables `context_str` and `query_str`; LlamaIndex's own where None.
        streaming: answer with a streaming response.
        output_cls: answer with an object of this class.
        prompt_helper: how the nodes are packed.

    Raises:
        ConfigError: the model is no `BlendLLM`.
        PromptError: when asked, where not even one node fits.
    """

    def __init__(self, llm: LLM | None = None, *, text_qa_template: BasePromptTemplate | None = None,
                 streaming: bool = False, output_cls: type[BaseModel] | None = None,
                 prompt_helper: BlendPromptHelper | None = None, callback_manager: CallbackManager | None = None,
                 empty_response: str | None = None) -> None:
        if streaming and output_cls is not None:
            raise ConfigError("an object cannot be streamed: leave streaming or output_cls out")
        llm = llm or Settings.llm
        blend_llm(llm)
        self._helper = prompt_helper or BlendPromptHelper(llm)
        super().__init__(llm=llm, callback_manager=callback_manager, prompt_helper=self._helper, streaming=streaming,
                         output_cls=output_cls, empty_response=empty_response)
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)

    def synthesize(self, query: str | QueryBundle, nodes: list[NodeWithScore],
                   additional_source_nodes: Sequence[NodeWithScore] | None = None,
                   **response_kwargs: Any) -> RESPONSE_TYPE:
        """Answers from the nodes that fit."""
        kept, dropped = self._choose(query, nodes)
        return _told(super().synthesize(query, kept, additional_source_nodes, **response_kwargs), dropped)

    async def asynthesize(self, query: str | QueryBundle, nodes: list[NodeWithScore],
                          additional_source_nodes: Sequence[NodeWithScore] | None = None,
                          **response_kwargs: Any) -> RESPONSE_TYPE:
        """Answers from the nodes that fit."""
        kept, dropped = self._choose(query, nodes)
        return _told(await super().asynthesize(query, kept, additional_source_nodes, **response_kwargs), dropped)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answers from the texts that fit; the last ones are left out, with a warning."""
        template = self._template(query_str)
        variables = response_kwargs | {"context_str": self._pack(template, text_chunks)}
        if self._streaming:
            return self._llm.stream(template, **variables)
        if self._output_cls is not None:
            found: BaseModel = self._llm.structured_predict(self._output_cls, template, **variables)
            return found
        return self._llm.predict(template, **variables) or self._empty_response

    async def aget_response(self, query_str: str, text_chunks: Sequence[str],
                            **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Like `get_response`, without blocking the event loop."""
        template = self._template(query_str)
        variables = response_kwargs | {"context_str": self._pack(template, text_chunks)}
        if self._streaming:
            return await self._llm.astream(template, **variables)
        if self._output_cls is not None:
            found: BaseModel = await self._llm.astructured_predict(self._output_cls, template, **variables)
            return found
        return await self._llm.apredict(template, **variables) or self._empty_response

    def _template(self, query: str) -> BasePromptTemplate:
        return self._text_qa_template.partial_format(query_str=query)

    def _choose(self, query: str | QueryBundle,
                nodes: Sequence[NodeWithScore]) -> tuple[list[NodeWithScore], list[NodeWithScore]]:
        """The nodes that fit, and the others, both in retrieval order."""
        texts = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes]
        scores = [node.score for node in nodes if node.score is not None]
        if len(scores) < len(nodes):
            scores = [float(-number) for number in range(len(nodes))]
        template = self._template(query if isinstance(query, str) else query.query_str)
        kept = self._fitting(template, texts, sorted(range(len(texts)), key=scores.__getitem__, reverse=True))
        return ([node for number, node in enumerate(nodes) if number in kept],
                [node for number, node in enumerate(nodes) if number not in kept])

    def _pack(self, template: BasePromptTemplate, texts: Sequence[str]) -> PackedText:
        kept = self._fitting(template, texts, range(len(texts)))
        chunks = [text.strip() for number, text in enumerate(texts) if number in kept]
        return PackedText(filter(None, chunks), blend_llm(self._llm).config.delimiter)

    def _fitting(self, template: BasePromptTemplate, texts: Sequence[str], order: Sequence[int]) -> set[int]:
        """Numbers of the texts that fit into one prompt, the first ones of `order`; the others are warned of."""
        if not texts:
            return set()
        room = self._helper.room(template, llm=self._llm)
        joint = self._helper.joint_tokens
        kept: set[int] = set()
        left = room + joint
        for number in order:
            cost = self._helper.tokens(texts[number].strip()) + joint
            if cost <= left:
                kept.add(number)
                left -= cost
            elif cost <= room + joint:
                break  # what is worth less does not take its place
        if not kept:
            raise PromptError(f"none of the {len(texts)} nodes fits into the prompt, which has room for {room} tokens: "
                              "split documents into smaller nodes, or raise max_model_len")
        if len(kept) < len(texts):
            _log.warning("%d of %d nodes are left out, as the prompt has room for %d tokens: retrieve fewer, raise "
                         "max_model_len, or use BlendPromptHelper with the response mode compact",
                         len(texts) - len(kept), len(texts), room)
        return kept


def _told(response: RESPONSE_TYPE, dropped: Sequence[NodeWithScore]) -> RESPONSE_TYPE:
    if dropped:
        response.metadata = (response.metadata or {}) | {DROPPED: [node.node_id for node in dropped]}
    return response
