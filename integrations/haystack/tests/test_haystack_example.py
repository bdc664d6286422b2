"""The example that the README points to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_the_example_reuses_what_it_indexed(example: Callable[..., str], tmp_path: Path) -> None:
    text = "The heron stands still in shallow water and waits for fish. It flies slowly, with its neck drawn in. " * 8
    (tmp_path / "heron.md").write_text(text)
    blended, alone = example("haystack_rag.py", str(tmp_path), "What does the heron eat?").split("vLLM alone:")
    assert "What does the heron eat? (from 2 documents)" in blended
    assert ", 0 of 0 chunks reused, 100% of the rows computed" in alone
    assert "2 of 2 chunks reused" in blended
