"""The example that the README points to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_the_example_reuses_what_it_encoded(example: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "heron.md").write_text("The heron stands still in shallow water, and waits there for fish. " * 20)
    cold, warm = example("llama_index_query.py", str(tmp_path), "What does the heron eat?").split("Warm, ")
    assert "What does the heron eat? (from 2 nodes)" in cold
    assert ", 0 of 2 chunks reused, 100% of the rows computed" in cold
    assert "2 of 2 chunks reused" in warm
