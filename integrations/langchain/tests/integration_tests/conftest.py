"""One engine for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blendrag import BlendEngine
from blendrag.models import fetch


@pytest.fixture(scope="package")
def engine() -> Iterator[BlendEngine]:
    """SmolLM2 on vLLM, in float32, without compilation."""
    with BlendEngine(str(fetch("smollm2")), dtype="float32", enforce_eager=True, max_model_len=2048) as engine:
        yield engine
