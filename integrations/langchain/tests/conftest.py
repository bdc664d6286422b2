"""What all tests of this package share."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.documents import Document

RIVERS = {"Arlon": "Semois", "Basel": "Rhine", "Cremona": "Po", "Dresden": "Elbe"}


@pytest.fixture
def documents() -> list[Document]:
    """Four short passages, each long enough to be stored."""
    return [
        Document(f"The city of {city} lies on the river {river}. It has a cathedral, a market square, two bridges and "
                 f"a museum of modern art.", metadata={"source": f"{city}.md"})
        for city, river in RIVERS.items()
    ]


@pytest.fixture(scope="session")
def hermes() -> str:
    """A chat template that shows tools: SmolLM2's own does not."""
    return Path(__file__).with_name("templates").joinpath("hermes.jinja").read_text()
