"""docs/models.md says what was seen."""

import re

from tests.engine.families import FAMILIES
from tests.engine.models_page import EVERY, PAGE, as_recorded, page, records
from tests.engine.more_families import MORE

RUN = "run python -m tests.engine.models_page"


def test_the_page_is_made_of_what_was_recorded():
    assert PAGE.read_text() == page(), RUN


def test_each_family_was_seen_to_do_what_the_page_says():
    found = records()
    assert [family.name for family in EVERY if not as_recorded(family, found.get(family.slug))] == [], RUN
    assert set(found) == {family.slug for family in EVERY}, RUN


def test_each_family_has_one_row_and_each_refusal_a_reason():
    assert len({family.slug for family in EVERY}) == len(FAMILIES) + len(MORE)
    for family in EVERY:
        assert bool(family.refusal) == bool(family.reason), family.name
        assert re.compile(family.refusal)


def test_families_that_work_are_right_to_rounding():
    errors = {family.name: record["error"] for family in EVERY if (record := records()[family.slug]).get("error")}
    assert {name for name, error in errors.items() if error > 5e-4} <= {"int8 weights"}
