"""docs/integrations.md says what was recorded, and what it says of our own classes is true today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.comparison import page
from tests.comparison.columns import OURS, ours
from tests.comparison.features import FEATURES, run
from tests.comparison.subject import Subject

ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    "one_bos": ["tests/test_tokens.py::test_a_bos_that_a_chat_template_rendered_is_not_doubled"],
    "close": ["integrations/langchain/tests/unit_tests/test_langchain_settings.py::test_a_closed_engine_is_replaced",
              "integrations/llama-index/tests/test_llama_index.py::test_a_closed_engine_is_replaced",
              "integrations/haystack/tests/test_haystack_serialisation.py::"
              "test_components_that_are_alike_share_an_engine_until_the_last_closes"],
}
"""Tests of the features whose probe needs an engine of its own."""


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
    """Subjects that were made, by column."""
    return {}


@pytest.fixture
def subject(request: pytest.FixtureRequest, smollm2_engine: Any, subjects: dict[str, Subject]) -> Subject:
    name = request.param
    if name not in subjects or subjects[name].watch.engine is None:  # type: ignore[attr-defined]
        subjects[name] = ours(name, engine=smollm2_engine)
    return subjects[name]


def test_the_page_is_what_was_recorded() -> None:
    found = page.results()
    assert page.PAGE.read_text() == page.page(found), "run python -m tests.comparison --write"
    assert list(found["cells"]) == list(page.COLUMNS)
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", page.RESULTS.with_name("rivals.txt").read_text(), re.MULTILINE))
    assert pinned.items() <= found["versions"].items()


@pytest.mark.parametrize("key", [key for key, feature in FEATURES.items() if not feature.alone])
@pytest.mark.parametrize("subject", OURS, indirect=True)
def test_our_cells_are_true(subject: Subject, key: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["subject"]
    assert run(FEATURES[key], subject) is page.results()["cells"][name][key]["value"]


def test_what_needs_an_engine_of_its_own_is_tested_elsewhere() -> None:
    assert list(ELSEWHERE) == sorted((key for key, feature in FEATURES.items() if feature.alone), reverse=True)
    for test in (test for tests in ELSEWHERE.values() for test in tests):
        file, name = test.split("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test
