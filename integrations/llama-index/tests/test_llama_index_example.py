"""The example that the README points to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama_index_query.py"
SMALL = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""One GiB of paged cache: unasked, vLLM fills most of the machine's memory with zeros."""


def test_the_example_reuses_what_it_encoded(tmp_path: Path) -> None:
    """In a process of its own, as its engine is one of its own."""
    (tmp_path / "heron.md").write_text("The heron stands still in shallow water, and waits there for fish. " * 20)
    done = subprocess.run([sys.executable, str(EXAMPLE), str(tmp_path), "What does the heron eat?"],
                          capture_output=True, text=True, check=False, env=SMALL)
    assert done.returncode == 0, done.stderr[-3000:]
    cold, warm = done.stdout.split("Warm:")
    assert "What does the heron eat? (from 2 nodes)" in cold
    assert ", 0 of 2 chunks reused, 100% of the rows computed" in cold
    assert "2 of 2 chunks reused" in warm
