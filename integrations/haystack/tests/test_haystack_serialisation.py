"""What pipelines do with the components besides running them: save, load, connect, close.  No engine is started."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from blendrag import BlendConfig, BlendEngine
from blendrag.errors import ConfigError
from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.utils import print_streaming_chunk
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.core.errors import DeserializationError, PipelineConnectError
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.document_stores.types import DuplicatePolicy
from haystack.tools import Toolset, tool
from pydantic import BaseModel

from haystack_integrations.components.generators.blendrag import BlendChatGenerator
from haystack_integrations.components.writers.blendrag import BlendDocumentWriter

TEMPLATE = [ChatMessage.from_user("{% for document in documents %}{{ document.content }}{% endfor %}{{ question }}")]
SETTINGS: dict[str, Any] = {"config": {"ratio": 0.3, "store_path": "/tmp/kv"}, "engine_args": {"max_model_len": 99}}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that come from the environment are saved, too."""
    monkeypatch.delenv("BLENDRAG_BLEND")


@tool
def weather(place: str) -> str:
    """Tells the weather."""
    return f"It rains in {place}."


def listen(chunk: StreamingChunk) -> None:
    """A callback that only this module has."""


class City(BaseModel):
    """A place."""

    name: str


def test_every_field_of_a_generator_is_saved_and_loaded() -> None:
    generator = BlendChatGenerator(
        Path("some/model"), **SETTINGS, streaming_callback=print_streaming_chunk, tools=[weather],
        chat_template="{{ 1 }}", generation_kwargs={"temperature": 0, "response_format": City})
    saved = generator.to_dict()
    name = "haystack_integrations.components.generators.blendrag.chat.chat_generator.BlendChatGenerator"
    assert saved == {"type": name, "init_parameters": {
        "model": "some/model", **SETTINGS, "chat_template": "{{ 1 }}",
        "generation_kwargs": {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {
            "name": "City", "strict": True, "schema": City.model_json_schema()}}},
        "streaming_callback": "haystack.components.generators.utils.print_streaming_chunk",
        "tools": saved["init_parameters"]["tools"],
    }}
    before = repr(saved)
    loaded = BlendChatGenerator.from_dict(allowing_this_module(saved))
    assert loaded.to_dict() == saved
    assert repr(saved) == before  # loading leaves its input alone
    assert loaded.streaming_callback is print_streaming_chunk
    assert loaded.tools == [weather]
    assert generator.generation_kwargs["response_format"] is City


def allowing_this_module(saved: dict[str, Any]) -> dict[str, Any]:
    """Lets Haystack import this module's tool, as an application does for its own."""
    from haystack.core.serialization import allow_deserialization_module

    allow_deserialization_module(__name__)
    return saved


def test_every_field_of_a_writer_is_saved_and_loaded() -> None:
    writer = BlendDocumentWriter(InMemoryDocumentStore(index="mine"), "m", policy=DuplicatePolicy.SKIP, prefix="Read:",
                                 **SETTINGS)
    saved = writer.to_dict()
    assert saved == {
        "type": "haystack_integrations.components.writers.blendrag.document_writer.BlendDocumentWriter",
        "init_parameters": {"document_store": InMemoryDocumentStore(index="mine").to_dict(), "model": "m",
                            "policy": "SKIP", "prefix": "Read:", **SETTINGS}}
    loaded = BlendDocumentWriter.from_dict(saved)
    assert loaded.to_dict() == saved
    assert loaded.policy is DuplicatePolicy.SKIP


@pytest.mark.parametrize("policy", [{"policy": "query"}, {}])
def test_a_policy_that_was_set_stays_set_and_wins_over_a_profile(policy: dict[str, str]) -> None:
    saved = BlendChatGenerator("m", config={"store_path": "/tmp/kv"} | policy).to_dict()
    loaded = BlendChatGenerator.from_dict(saved)
    assert loaded.to_dict() == saved
    assert saved["init_parameters"]["config"] == {"store_path": "/tmp/kv"} | policy


def test_a_pipeline_is_dumped_and_loaded() -> None:
    pipeline = rag_pipeline()
    saved, loaded = pipeline.to_dict(), Pipeline.loads(pipeline.dumps()).to_dict()
    assert loaded["components"] == saved["components"]
    assert sorted(map(str, loaded["connections"])) == sorted(map(str, saved["connections"]))


def test_callbacks_come_from_allowed_modules_only() -> None:
    text = rag_pipeline(streaming_callback=listen, tools=Toolset([])).dumps()
    with pytest.raises(DeserializationError, match="allow"):
        Pipeline.loads(text.replace(f"{__name__}.listen", "subprocess.run"))
    loaded = Pipeline.loads(text, allowed_modules=[__name__]).get_component("llm")
    assert loaded.streaming_callback is listen  # type: ignore[attr-defined]


def rag_pipeline(**arguments: Any) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(InMemoryDocumentStore()))
    pipeline.add_component("builder", ChatPromptBuilder(TEMPLATE))
    pipeline.add_component("llm", BlendChatGenerator("m", **SETTINGS, **arguments))
    pipeline.connect("retriever.documents", "builder.documents")
    pipeline.connect("retriever.documents", "llm.documents")
    pipeline.connect("builder.prompt", "llm.messages")
    return pipeline


def test_connections_are_checked() -> None:
    pipeline = rag_pipeline()
    pipeline.add_component("writer", BlendDocumentWriter(InMemoryDocumentStore(), "m"))
    pipeline.connect("retriever.documents", "writer.documents")
    with pytest.raises(PipelineConnectError):
        pipeline.connect("llm.replies", "writer.policy")
    with pytest.raises(PipelineConnectError):
        pipeline.connect("writer.documents_written", "llm.documents")


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "BlendChatGenerator needs a model"),
    ({"model": "m", "engine": BlendEngine("m")}, "leave them out"),
    ({"model": "m", "config": {"policy": "best"}}, "there is no policy 'best'"),
    ({"model": "m", "config": {"rato": 1}}, "there is no setting 'rato'"),
])
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendChatGenerator(**arguments)


async def test_components_that_are_alike_share_an_engine_until_the_last_closes() -> None:
    generator = BlendChatGenerator("m", **SETTINGS)
    writer = BlendDocumentWriter(InMemoryDocumentStore(), "m", config=BlendConfig(**SETTINGS["config"]),
                                 engine_args=SETTINGS["engine_args"])
    engine = generator.engine
    assert writer.engine is engine
    assert BlendChatGenerator("other", **SETTINGS).engine is not engine
    writer.close()
    assert not engine.closed
    await generator.close_async()
    assert engine.closed
    assert generator.engine is not engine  # the next use makes a new one


def test_a_component_that_is_gone_holds_no_engine() -> None:
    generator, gone = BlendChatGenerator("gone", **SETTINGS), BlendChatGenerator("gone", **SETTINGS)
    engine = generator.engine
    assert gone.engine is engine
    del gone
    gc.collect()
    generator.close()
    assert engine.closed


def test_an_engine_that_was_handed_over_is_left_open_and_found_again() -> None:
    engine = BlendEngine("handed", max_model_len=98)
    generator = BlendChatGenerator(engine=engine)
    loaded = BlendChatGenerator.from_dict(generator.to_dict())
    assert loaded.engine is engine
    loaded.close()
    generator.close()
    assert not engine.closed
