"""docs/models.md says what the tests say."""

import re

from tests.engine.families import FAMILIES
from tests.engine.models_page import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m tests.engine.models_page"


def test_each_family_has_one_row_and_each_refusal_a_reason():
    assert len({family.slug for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert bool(family.refusal) == bool(family.reason), family.name
        assert re.compile(family.refusal)
