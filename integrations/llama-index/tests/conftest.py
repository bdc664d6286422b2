"""What the tests of this package share: a model, some documents, and records of what happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from blendrag import BlendEngine, BlendOutput
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.schema import TextNode
from llama_index_reference import Exchange, Recorder

from llama_index.llms.blendrag import BlendLLM


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine, temperature=0, max_tokens=4)


@pytest.fixture
def passages() -> list[str]:
    """Three short passages, each long enough to be stored."""
    rivers = {"Arlon": "Semois", "Basel": "Rhine", "Dresden": "Elbe"}
    return [f"The city of {city} lies on the river {river}. It has a cathedral, a market square, two bridges and a "
            "museum of modern art." for city, river in rivers.items()]


@pytest.fixture
def nodes(passages: list[str]) -> list[TextNode]:
    """The passages with metadata, which is part of what the model reads."""
    return [TextNode(text=text, id_=f"node {number}", metadata={"page": number}) for number, text in
            enumerate(passages)]


@pytest.fixture
def events() -> Iterator[Recorder]:
    """Every event that LlamaIndex emits."""
    recorder = Recorder(seen=[])
    get_dispatcher().event_handlers.append(recorder)
    yield recorder
    get_dispatcher().event_handlers.remove(recorder)


@pytest.fixture
def exchanges(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Every request that the engine answers from now on; none finds another's blocks in vLLM's prefix cache."""
    found: list[Exchange] = []
    generate, stream = engine.generate, engine.stream

    def note(output: BlendOutput) -> BlendOutput:
        if output.finished:
            found.append(Exchange(engine.tokenizer.decode(output.prompt_token_ids), output.text, output.stats))
        return output

    def alone(options: dict[str, Any]) -> dict[str, Any]:
        engine._start().call(lambda vllm: vllm.reset_prefix_cache())
        return {"policy": "none"} | options

    monkeypatch.setattr(engine, "generate", lambda *args, **given: [*map(note, generate(*args, **alone(given)))])
    monkeypatch.setattr(engine, "stream", lambda *args, **given: map(note, stream(*args, **alone(given))))
    return found
