"""`BlendPromptHelper`: packs retrieved nodes into prompts without cutting them up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate

from blendrag import mark_chunks
from blendrag.errors import ConfigError, PromptError
from llama_index.llms.blendrag import BlendLLM
from llama_index.response_synthesizers.blendrag.packing import SEPARATOR, PackedText, TextList

_log = logging.getLogger(__name__)

_PROBE = "chunk"


class BlendPromptHelper(PromptHelper):
    """LlamaIndex's prompt helper, but for chunks whose KV is stored: it never cuts a chunk that fits into a prompt.

    Chunks are packed in retrieval order, as many as fit, joined by a blank line as LlamaIndex joins them, and marked
    for the engine.  No chunk overlaps with the next.  Tokens are counted by the engine's own tokenizer in the prompt
    that the model will really be sent, chat template included.  Without the marks, which the model never sees, the text
    is what LlamaIndex would have packed into a window that is large enough.

    A chunk that is longer than a prompt has room for is the exception: as LlamaIndex does it is split, so that nothing
    of it is lost, but the pieces are new chunks whose KV is not stored.  A warning in the log says so; split documents
    smaller, or raise `max_model_len`.

    `get_response_synthesizer(prompt_helper=...)` uses it in the modes `compact`, `refine`, `tree_summarize`,
    `accumulate` and `compact_accumulate`.  Chat engines, and whatever else takes no prompt helper, use
    `Settings.prompt_helper`.  The mode `simple_summarize` joins the nodes before a helper sees them: what is stored is
    found in it all the same, by its tokens; `BlendSynthesizer` marks it.  (That mode formats a Python list into the
    prompt, as of llama-index-core 0.14; with this helper the prompt holds the text itself.)

    Example:
        >>> helper = BlendPromptHelper(llm)
        >>> synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper)
        >>> index.as_query_engine(llm=llm, response_synthesizer=synthesizer)
        >>> Settings.prompt_helper = helper             # for chat engines

    Args:
        llm: the model, alone or as a structured LLM; its engine starts.
        num_output: tokens to keep free for the answer; the model's `max_tokens` where None, or a quarter of the window
            where that is less.
        chunk_size_limit: most tokens of chunks in one prompt; no limit where None.

    Raises:
        ConfigError: the model is no `BlendLLM`.
        PromptError: when packing, where a prompt has no room for any chunk.
    """

    _llm: BlendLLM = PrivateAttr()

    def __init__(self, llm: LLM, *, num_output: int | None = None, chunk_size_limit: int | None = None) -> None:
        own = blend_llm(llm)
        metadata = own.metadata
        if num_output is None:
            most = metadata.context_window // 4
            num_output = most if metadata.num_output < 0 else min(metadata.num_output, most)
        super().__init__(context_window=metadata.context_window, num_output=num_output, chunk_overlap_ratio=0,
                         chunk_size_limit=chunk_size_limit, tokenizer=own.engine.tokens.chunk_ids)
        self._llm = own

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "BlendPromptHelper"

    def repack(self, prompt: BasePromptTemplate, text_chunks: Sequence[str], padding: int = DEFAULT_PADDING,
               llm: LLM | None = None, tools: list[Any] | None = None) -> list[str]:
        """Texts that each fill a prompt: whole chunks in order, marked.

        What comes from an earlier call is taken apart into its chunks again, as synthesizers pack more than once.
        """
        chunks = list(_chunks(text_chunks))
        if not chunks:
            return [PackedText([], self._llm.config.delimiter)]  # synthesizers ask the model about an empty context
        room = self.room(prompt, padding=padding, llm=llm, tools=tools)
        joint = self.joint_tokens
        packs: list[list[str]] = []
        left = 0
        for chunk in self._fitting(chunks, room):
            cost = self.tokens(chunk)
            if packs and joint + cost <= left:
                packs[-1].append(chunk)
                left -= joint + cost
            else:
                packs.append([chunk])
                left = room - cost
        return [PackedText(pack, self._llm.config.delimiter) for pack in packs]

    def truncate(self, prompt: BasePromptTemplate, text_chunks: Sequence[str], padding: int = DEFAULT_PADDING,
                 llm: LLM | None = None, tools: list[Any] | None = None) -> list[str]:
        """The beginning of each text, cut so that all fit into one prompt; a warning names the tokens that are lost."""
        cut = super().truncate(prompt, text_chunks, padding, llm, tools)
        for before, after in zip(text_chunks, cut, strict=True):
            if len(after) < len(before.strip()):
                _log.warning("%d tokens of context do not fit into the prompt and are cut off after %d: retrieve less, "
                             "raise max_model_len, or use a response mode that asks several times",
                             self.tokens(before), self.tokens(after))
        return TextList(cut)

    def room(self, prompt: BasePromptTemplate, *, padding: int = DEFAULT_PADDING, llm: LLM | None = None,
             tools: list[Any] | None = None) -> int:
        """Tokens that a prompt has room for, besides its own text and the answer.

        Raises:
            PromptError: there is no room.
        """
        room = self._get_available_chunk_size(prompt, padding=padding, llm=llm, tools=tools)
        if room <= 0:
            raise PromptError(f"the prompt leaves no room for chunks in {self.context_window} tokens, with "
                              f"{self.num_output} for the answer and {padding} to spare: shorten it (or the chat's "
                              "history), lower max_tokens, or raise max_model_len")
        return room

    def tokens(self, chunk: str) -> int:
        """Length of a chunk in tokens."""
        return len(self._llm.engine.tokens.chunk_ids(chunk))

    @property
    def joint_tokens(self) -> int:
        """Tokens between two chunks."""
        config = self._llm.config
        delimiter = config.delimiter if config.delimiter and config.keep_delimiter else ""
        between = delimiter + SEPARATOR + delimiter
        return len(self._llm.engine.tokens.text_ids(between))

    def _fitting(self, chunks: Iterable[str], room: int) -> Iterator[str]:
        """The chunks, those that are too long in pieces."""
        for chunk in chunks:
            length = self.tokens(chunk)
            if length <= room:
                yield chunk
                continue
            _log.warning("a chunk of %d tokens is split, and its stored KV is not used, as the prompt has room for %d: "
                         "split documents into smaller nodes, or raise max_model_len", length, room)
            yield from self._splitter(room).split_text(chunk)

    def _splitter(self, room: int) -> Any:
        from llama_index.core.node_parser import TokenTextSplitter

        return TokenTextSplitter(separator=self.separator, chunk_size=room, chunk_overlap=0,
                                 tokenizer=self._llm.engine.tokens.chunk_ids)

    def _get_available_chunk_size(self, prompt: BasePromptTemplate, num_chunks: int = 1,
                                  padding: int = DEFAULT_PADDING, llm: LLM | None = None,
                                  tools: list[Any] | None = None) -> int:
        """LlamaIndex's estimate, but counted: the prompt is rendered around a chunk of known length."""
        if isinstance(prompt, SelectorPromptTemplate):
            prompt = prompt.select(llm=self._llm)
        probe = mark_chunks([_PROBE], self._llm.config.delimiter)
        empty = {name: probe for name in prompt.template_vars if name not in prompt.kwargs}
        rendered = self._llm.render(prompt, **empty)
        used = len(self._llm.engine.tokens(rendered).ids)
        used -= sum(self.tokens(chunk) for chunk in rendered.chunks if chunk == _PROBE)
        shown = list(tools or []) + (self._get_tools_from_llm(llm=llm) if isinstance(llm, StructuredLLM) else [])
        used += self._token_counter.estimate_tokens_in_tools([tool.metadata.to_openai_tool() for tool in shown])
        available = (self.context_window - self.num_output - used) // num_chunks - padding
        return available if self.chunk_size_limit is None else min(available, self.chunk_size_limit)


def blend_llm(llm: LLM) -> BlendLLM:
    """The model itself, or the one within a structured LLM; ConfigError where it is another's."""
    inner = llm.llm if isinstance(llm, StructuredLLM) else llm
    if not isinstance(inner, BlendLLM):
        raise ConfigError(f"{type(inner).__name__} reads no marked chunks: pass llm=BlendLLM(...)")
    return inner


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if isinstance(text, PackedText):
            yield from text.chunks
        elif text.strip():
            yield text.strip()
