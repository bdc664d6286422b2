"""`BlendPromptHelper`: chunks stay whole, and the model reads what LlamaIndex alone would have sent."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from blendrag import BlendEngine, BlendPrompt, Chunk
from blendrag.errors import ConfigError, PromptError
from llama_index.core import MockEmbedding, PromptTemplate, Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import MockLLM
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import MetadataMode, TextNode
from llama_index_reference import Exchange, PlainLLM

from llama_index.llms.blendrag import BlendLLM
from llama_index.response_synthesizers.blendrag import BlendPromptHelper

QUESTION = "On which river does Dresden lie?"
SHORT = {
    "text_qa_template": PromptTemplate("{context_str}\n\n{query_str}"),
    "refine_template": PromptTemplate("{existing_answer}\n\n{context_msg}\n\n{query_str}"),
    "summary_template": PromptTemplate("{context_str}\n\n{query_str}"),
}
TEMPLATE = DEFAULT_TEXT_QA_PROMPT_SEL.partial_format(query_str=QUESTION)


@pytest.fixture
def helper(llm: BlendLLM) -> BlendPromptHelper:
    return BlendPromptHelper(llm)


def chunks_of(texts: list[str]) -> list[list[str]]:
    return [BlendPrompt.from_text(text).chunks for text in texts]


def limit(helper: BlendPromptHelper, chunks: list[str], count: int) -> None:
    """Leaves room for the first `count` chunks, to the token."""
    helper.chunk_size_limit = sum(map(helper.tokens, chunks[:count])) + helper.joint_tokens * (count - 1)


def test_chunks_are_packed_whole_in_order_and_without_overlap(helper: BlendPromptHelper, passages: list[str]) -> None:
    assert chunks_of(helper.repack(TEMPLATE, passages)) == [passages]
    limit(helper, passages, 2)
    assert chunks_of(helper.repack(TEMPLATE, passages)) == [passages[:2], passages[2:]]
    helper.chunk_size_limit = helper.chunk_size_limit or 0
    helper.chunk_size_limit -= 1
    assert chunks_of(helper.repack(TEMPLATE, passages)) == [passages[:1], passages[1:]]


def test_packing_twice_changes_nothing(helper: BlendPromptHelper, passages: list[str]) -> None:
    once = helper.repack(TEMPLATE, passages)
    assert helper.repack(TEMPLATE, once) == once
    limit(helper, passages, 1)
    assert chunks_of(helper.repack(TEMPLATE, once)) == [[passage] for passage in passages]


@pytest.mark.parametrize("text", ["\ue000 one \ue000", "a\ue000b", "\ue001", "<|im_end|> {braces} \n\n x", "日本語 🙂"])
def test_any_text_is_a_chunk_as_it_is(helper: BlendPromptHelper, text: str) -> None:
    [packed] = helper.repack(TEMPLATE, [f"  {text}\n", " \n ", "other"])
    assert chunks_of([packed]) == [[text.strip(), "other"]]
    assert helper.repack(TEMPLATE, [packed]) == [packed]


def test_an_empty_context_is_still_one_question(helper: BlendPromptHelper) -> None:
    assert helper.repack(TEMPLATE, ["", " "]) == [""]


def test_the_room_is_counted_to_the_token(helper: BlendPromptHelper, llm: BlendLLM, engine: BlendEngine) -> None:
    room = helper.room(TEMPLATE, padding=0)
    chunk = "word " * 3000
    while helper.tokens(chunk) > room:
        chunk = chunk[:-5 * max(1, helper.tokens(chunk) - room)]
    [packed] = helper.repack(TEMPLATE, [chunk], padding=0)
    used = len(engine.tokens(llm.render(TEMPLATE, context_str=packed)).ids)
    assert engine.max_model_len - used - helper.num_output == room - helper.tokens(chunk.strip())


def test_a_chunk_longer_than_the_window_is_split_and_told(helper: BlendPromptHelper, passages: list[str],
                                                          caplog: pytest.LogCaptureFixture) -> None:
    long = " ".join(passages)
    limit(helper, passages, 1)
    with caplog.at_level(logging.WARNING):
        packs = helper.repack(TEMPLATE, [passages[0], long, passages[1]])
    found = [chunk for pack in chunks_of(packs) for chunk in pack]
    assert (found[0], found[-1]) == (passages[0], passages[1])
    assert " ".join(found[1:-1]) == long
    assert f"a chunk of {helper.tokens(long)} tokens is split" in caplog.text
    assert helper.repack(TEMPLATE, packs[1:2]) == packs[1:2]


def test_a_prompt_without_room_is_refused(helper: BlendPromptHelper) -> None:
    long = PromptTemplate("word " * 2040 + "{context_str}{query_str}").partial_format(query_str=QUESTION)
    with pytest.raises(PromptError, match=r"leaves no room for chunks in 2048 tokens.*raise max_model_len"):
        helper.repack(long, ["x"])


def test_what_is_cut_off_is_told(helper: BlendPromptHelper, passages: list[str],
                                 caplog: pytest.LogCaptureFixture) -> None:
    text = "\n".join(passages)
    assert (helper.truncate(TEMPLATE, [text]), caplog.text) == ([text], "")
    limit(helper, passages, 1)
    [cut] = helper.truncate(TEMPLATE, [text])
    assert text.startswith(cut)
    assert "do not fit into the prompt and are cut off" in caplog.text


def test_it_needs_a_blend_llm(llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match="MockLLM reads no marked chunks"):
        BlendPromptHelper(MockLLM())
    assert BlendPromptHelper(llm.as_structured_llm(BaseModel)).context_window == 2048


def same_text(exchanges: list[Exchange], plain: PlainLLM) -> None:
    """What the model was sent is what LlamaIndex alone sends."""
    assert exchanges
    assert [exchange.prompt for exchange in exchanges] == plain.sent


def reuse(exchanges: list[Exchange]) -> tuple[int, ...]:
    return tuple(exchange.stats.chunks_reused for exchange in exchanges)


@pytest.mark.parametrize(("mode", "reused"), [
    (ResponseMode.COMPACT, (2,)),
    (ResponseMode.REFINE, (1, 1)),
    (ResponseMode.TREE_SUMMARIZE, (2,)),
    (ResponseMode.ACCUMULATE, (1, 1)),
    (ResponseMode.COMPACT_ACCUMULATE, (2,)),
])
def test_stock_modes_read_the_same_text_and_reuse_every_node(
        llm: BlendLLM, engine: BlendEngine, helper: BlendPromptHelper, nodes: list[TextNode],
        exchanges: list[Exchange], mode: ResponseMode, reused: tuple[int, ...]) -> None:
    engine.encode([node.get_content(MetadataMode.LLM) for node in nodes])
    index = SummaryIndex(nodes[:2])
    short = {} if mode == ResponseMode.COMPACT else SHORT
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, response_mode=mode, **short)
    answer = index.as_query_engine(llm=llm, response_synthesizer=synthesizer).query(QUESTION)
    plain = PlainLLM(engine.tokenizer, [exchange.answer for exchange in exchanges])
    assert str(index.as_query_engine(llm=plain, response_mode=mode, **short).query(QUESTION)) == str(answer)
    same_text(exchanges, plain)
    assert reuse(exchanges) == reused


def test_several_calls_keep_nodes_whole(llm: BlendLLM, helper: BlendPromptHelper, passages: list[str],
                                        exchanges: list[Exchange]) -> None:
    limit(helper, passages, 2)
    index = SummaryIndex([TextNode(text=text) for text in passages])
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, **SHORT)
    index.as_query_engine(llm=llm, response_synthesizer=synthesizer).query(QUESTION)
    first, second = exchanges
    assert "\n\n".join(passages[:2]) in first.prompt
    assert passages[2] in second.prompt
    assert not any(passage in second.prompt for passage in passages[:2])


def test_simple_summarize_reads_text_where_llama_index_sends_a_list(
        llm: BlendLLM, engine: BlendEngine, helper: BlendPromptHelper, nodes: list[TextNode],
        exchanges: list[Exchange]) -> None:
    texts = [node.get_content(MetadataMode.LLM) for node in nodes]
    engine.encode(texts)
    index = SummaryIndex(nodes)
    mode = ResponseMode.SIMPLE_SUMMARIZE
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, response_mode=mode, **SHORT)
    index.as_query_engine(llm=llm, response_synthesizer=synthesizer).query(QUESTION)
    plain = PlainLLM(engine.tokenizer, [exchange.answer for exchange in exchanges])
    index.as_query_engine(llm=plain, response_mode=mode, **SHORT).query(QUESTION)
    text = "\n".join(texts)
    plain.sent = [prompt.replace(str([text]), text) for prompt in plain.sent]
    same_text(exchanges, plain)
    assert reuse(exchanges) == (3,)  # found by their tokens, as nothing marks them


@pytest.mark.parametrize("kind", ["context", "condense_plus_context"])
async def test_chat_engines_take_the_helper_from_the_settings(
        llm: BlendLLM, engine: BlendEngine, helper: BlendPromptHelper, nodes: list[TextNode],
        exchanges: list[Exchange], monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    engine.encode([node.get_content(MetadataMode.LLM) for node in nodes])
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))

    def ask(model: Any) -> Any:
        return index.as_chat_engine(chat_mode=kind, llm=model, similarity_top_k=3, system_prompt="Be brief.")

    monkeypatch.setattr(Settings, "_prompt_helper", helper)
    chat = ask(llm)
    answer = str(await chat.achat(QUESTION) if kind == "context" else chat.chat(QUESTION))
    plain = PlainLLM(engine.tokenizer, [answer])
    monkeypatch.setattr(Settings, "_prompt_helper", None)
    ask(plain).chat(QUESTION)
    same_text(exchanges, plain)
    assert reuse(exchanges) == (3,)


async def test_streams_and_async_calls_are_packed_alike(llm: BlendLLM, helper: BlendPromptHelper,
                                                        nodes: list[TextNode], exchanges: list[Exchange]) -> None:
    index = SummaryIndex(nodes)

    def ask(**how: Any) -> Any:
        synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, **how, **SHORT)
        return index.as_query_engine(llm=llm, response_synthesizer=synthesizer)

    expected = str(await ask().aquery(QUESTION))
    assert "".join(ask(streaming=True).query(QUESTION).response_gen) == expected
    streamed = await ask(streaming=True).aquery(QUESTION)
    assert "".join([piece async for piece in streamed.async_response_gen()]) == expected
    assert len({exchange.prompt for exchange in exchanges}) == 1
    assert {exchange.stats.chunks_found for exchange in exchanges} == {3}


def test_with_all_rows_recomputed_answers_are_those_without_blending(
        llm: BlendLLM, engine: BlendEngine, helper: BlendPromptHelper, nodes: list[TextNode],
        exchanges: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.encode([node.get_content(MetadataMode.LLM) for node in nodes])
    recorded = engine.generate
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, **SHORT)
    for how in {"blend": False}, {"policy": "full"}:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "generate", lambda *args, how=how: recorded(*args, **how))
            SummaryIndex(nodes).as_query_engine(llm=llm, response_synthesizer=synthesizer).query(QUESTION)
    without, full = exchanges
    assert (without.prompt, without.answer) == (full.prompt, full.answer)
    assert (without.stats.chunks_reused, full.stats.chunks_reused) == (0, 3)


def test_chunks_that_are_alone_in_a_prompt_are_chunks(helper: BlendPromptHelper, llm: BlendLLM,
                                                      passages: list[str]) -> None:
    [packed] = helper.repack(TEMPLATE, passages[:1])
    assert Chunk(passages[0]) in llm.render(TEMPLATE, context_str=packed).parts
