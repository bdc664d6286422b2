"""What all tests of this package share."""

from __future__ import annotations

from typing import Any

import pytest
from blendrag import BlendEngine, BlendOutput
from haystack import Document

from haystack_integrations.components.generators.blendrag import BlendChatGenerator

RIVERS = {"Arlon": "Semois", "Basel": "Rhine", "Cremona": "Po", "Dresden": "Elbe"}


@pytest.fixture
def documents() -> list[Document]:
    """Four short passages, each long enough to be stored."""
    return [
        Document(content=f"The city of {city} lies on the river {river}. It has a cathedral, a market square, two "
                         "bridges and a museum of modern art.", meta={"source": f"{city}.md"})
        for city, river in RIVERS.items()
    ]


@pytest.fixture
def generator(engine: BlendEngine) -> BlendChatGenerator:
    """Greedy, and brief."""
    return BlendChatGenerator(engine=engine, generation_kwargs={"temperature": 0, "max_tokens": 4})


@pytest.fixture
def answered(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> list[BlendOutput]:
    """The last output of every request that was streamed to its end, as the engine returned it."""
    seen: list[BlendOutput] = []
    stream = engine.stream

    def record(*arguments: Any, **options: Any) -> Any:
        for output in stream(*arguments, **options):
            if output.finished:
                seen.append(output)
            yield output

    monkeypatch.setattr(engine, "stream", record)
    return seen
