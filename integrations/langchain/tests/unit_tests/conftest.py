"""What the unit tests of this package share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that come from the environment are saved, too."""
    monkeypatch.delenv("BLENDRAG_BLEND")
