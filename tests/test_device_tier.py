"""The tier on the device keeps what was used last, within its budget.  (Copying needs a GPU; keeping does not.)"""

import torch

from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.store import KVEntry

SIZE = 2 * 4 * 2 * 10 * 1 * 8  # bytes of an entry: keys and values, float32, [2, 10, 1, 8]


def entries(names: str) -> dict[str, KVEntry]:
    return {name: KVEntry(torch.zeros(2, 10, 1, 8), torch.ones(2, 10, 1, 8)) for name in names}


def tier(room: int) -> DeviceTier:
    return DeviceTier(torch.device("cpu"), room * SIZE)


def held(tier: DeviceTier) -> str:
    return "".join(name for name in "abcdef" if tier.get(name) is not None)


def test_what_fits_is_held_and_what_does_not_is_read_where_it_is():
    store = entries("abc")
    device = tier(room=2)
    placed = device.hold(store)
    assert held(device) == "ab"
    assert [placed[name] is store[name] for name in "abc"] == [False, False, True]


def test_the_least_recently_used_leave():
    device = tier(room=3)
    device.hold(entries("abc"))
    device.hold(entries("a"))
    device.hold(entries("d"))
    assert held(device) == "acd"


def test_what_a_step_needs_does_not_leave_for_what_it_needs_too():
    device = tier(room=2)
    device.hold(entries("ab"))
    placed = device.hold(entries("bca"))
    assert held(device) == "ab"
    assert set(placed) == {"a", "b", "c"}


def test_an_entry_that_is_held_is_not_copied_again():
    device = tier(room=2)
    first = device.hold(entries("a"))["a"]
    assert device.hold(entries("a"))["a"] is first


def test_what_is_dropped_leaves_room():
    device = tier(room=2)
    device.hold(entries("ab"))
    device.drop("a")
    device.drop("never held")
    device.hold(entries("c"))
    assert held(device) == "bc"


def test_without_a_budget_nothing_is_held():
    device = tier(room=0)
    store = entries("a")
    assert device.hold(store) == store
    assert held(device) == ""


def test_copies_that_a_failed_pass_never_asked_for_are_still_to_be_made():
    device = tier(room=2)
    device.hold(entries("a"))
    device.hold(entries("b"))
    assert list(device._waiting) == ["a", "b"]
    device.hold(entries("cd"))
    assert list(device._waiting) == ["c", "d"], "those that left need no copy"
