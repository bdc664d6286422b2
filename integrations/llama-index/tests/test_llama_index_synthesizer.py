"""`BlendSynthesizer`: one call with whole nodes, and nothing is left out in silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from blendrag import BlendEngine
from blendrag.errors import ConfigError, PromptError
from llama_index.core import PromptTemplate, SummaryIndex
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import MockLLM
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index_reference import Exchange, PlainLLM

from llama_index.llms.blendrag import BlendLLM
from llama_index.response_synthesizers.blendrag import BlendPromptHelper, BlendSynthesizer

QUESTION = "On which river does Dresden lie?"
TEMPLATE = PromptTemplate("{context_str}\n\n{query_str}")


@pytest.fixture
def texts(nodes: list[TextNode]) -> list[str]:
    return [node.get_content(MetadataMode.LLM) for node in nodes]


@pytest.fixture
def helper(llm: BlendLLM) -> BlendPromptHelper:
    return BlendPromptHelper(llm)


def scored(nodes: list[TextNode], *scores: float | None) -> list[NodeWithScore]:
    return [NodeWithScore(node=node, score=score) for node, score in zip(nodes, scores, strict=True)]


def test_it_reads_what_llama_index_alone_would_send(llm: BlendLLM, engine: BlendEngine, nodes: list[TextNode],
                                                    texts: list[str], exchanges: list[Exchange]) -> None:
    engine.encode(texts)
    index = SummaryIndex(nodes)
    synthesizer = BlendSynthesizer(llm)
    answer = index.as_query_engine(llm=llm, response_synthesizer=synthesizer).query(QUESTION)
    plain = PlainLLM(engine.tokenizer, [str(answer)])
    index.as_query_engine(llm=plain).query(QUESTION)
    assert [exchange.prompt for exchange in exchanges] == plain.sent
    assert [exchange.stats.chunks_reused for exchange in exchanges] == [3]
    assert set(answer.metadata) == {node.node_id for node in nodes}


@pytest.mark.parametrize(("scores", "dropped"), [
    ((0.9, 0.1, 0.5), ["node 1"]),
    ((0.1, 0.8, 0.5), ["node 0"]),
    ((0.9, None, 0.5), ["node 2"]),
])
async def test_the_least_relevant_nodes_are_left_out_and_named(
        llm: BlendLLM, helper: BlendPromptHelper, nodes: list[TextNode], texts: list[str],
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scores: Any, dropped: list[str]) -> None:
    asked: list[str] = []
    monkeypatch.setattr(BlendLLM, "predict", lambda _self, template, **given: asked.append(given["context_str"]))
    helper.chunk_size_limit = 2 * max(map(helper.tokens, texts)) + helper.joint_tokens
    synthesizer = BlendSynthesizer(llm, prompt_helper=helper)
    with caplog.at_level(logging.WARNING):
        response = synthesizer.synthesize(QUESTION, scored(nodes, *scores))
    assert response.metadata["dropped_nodes"] == dropped
    kept = [node for node in nodes if node.node_id not in dropped]
    assert [source.node_id for source in response.source_nodes] == [node.node_id for node in kept]
    assert [packed.chunks for packed in asked] == [tuple(node.get_content(MetadataMode.LLM) for node in kept)]
    assert "1 of 3 nodes are left out" in caplog.text


def test_a_node_longer_than_the_window_makes_way_for_the_others(llm: BlendLLM, helper: BlendPromptHelper,
                                                                nodes: list[TextNode], texts: list[str],
                                                                exchanges: list[Exchange]) -> None:
    helper.chunk_size_limit = helper.tokens(texts[0])
    long = TextNode(text=" ".join(texts), id_="long")
    synthesizer = BlendSynthesizer(llm, prompt_helper=helper, text_qa_template=TEMPLATE)
    response = synthesizer.synthesize(QUESTION, [NodeWithScore(node=long, score=1), NodeWithScore(node=nodes[0])])
    assert response.metadata["dropped_nodes"] == ["long"]
    assert texts[0] in exchanges[0].prompt
    with pytest.raises(PromptError, match="none of the 1 nodes fits"):
        synthesizer.synthesize(QUESTION, [NodeWithScore(node=long, score=1)])
    with pytest.raises(PromptError, match="none of the 1 nodes fits"):
        synthesizer.get_response(QUESTION, [long.text])


async def test_every_kind_of_answer(llm: BlendLLM, nodes: list[TextNode], exchanges: list[Exchange]) -> None:
    found = scored(nodes[:1], 1)

    def ask(**how: Any) -> BlendSynthesizer:
        return BlendSynthesizer(llm, text_qa_template=TEMPLATE, **how)

    expected = str(await ask().asynthesize(QUESTION, found))
    streamed: Any = ask(streaming=True).synthesize(QUESTION, found)
    assert "".join(streamed.response_gen) == expected
    streamed = await ask(streaming=True).asynthesize(QUESTION, found)
    assert "".join([piece async for piece in streamed.async_response_gen()]) == expected
    assert len({exchange.prompt for exchange in exchanges}) == 1
    assert str(ask(empty_response="Nothing.").synthesize(QUESTION, [])) == "Nothing."


def test_its_prompts_can_be_changed(llm: BlendLLM) -> None:
    synthesizer = BlendSynthesizer(llm)
    synthesizer.update_prompts({"text_qa_template": TEMPLATE})
    assert synthesizer.get_prompts() == {"text_qa_template": TEMPLATE}


def test_bad_arguments_are_named(llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match="MockLLM reads no marked chunks"):
        BlendSynthesizer(MockLLM())
    with pytest.raises(ConfigError, match="leave streaming or output_cls out"):
        BlendSynthesizer(llm, streaming=True, output_cls=BaseModel)
