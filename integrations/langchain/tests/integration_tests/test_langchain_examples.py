"""The examples that the README points to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of two chunks."""
    text = "The heron stands still in shallow water and waits for fish. It flies slowly, with its neck drawn in. " * 16
    (tmp_path / "heron.md").write_text(text)
    return tmp_path


def test_the_chain_reuses_what_the_store_holds(example: Callable[..., str], folder: Path) -> None:
    plain, blended = example("langchain_rag.py", str(folder), "What does the heron eat?").split("One that stores KV:")
    assert "What does the heron eat? (from 2 chunks)" in plain
    assert "0 of 2 chunks reused" in plain
    assert "2 of 2 chunks reused" in blended


def test_the_agent_reuses_what_its_tool_returned(example: Callable[..., str], folder: Path) -> None:
    _, first, second = example("langchain_agent.py", str(folder), "What is it?", "How does it fly?").split("\n> ")
    call, answer = [line for line in first.splitlines() if "chunks:" in line]
    assert "query" in first
    assert " 0 chunks:" in call
    assert " 2 chunks: 2 reused" in answer
    [later] = [line for line in second.splitlines() if "chunks:" in line]
    assert " 2 chunks:" in later
