"""A pass takes all rows of all lanes through the model, in order, in as few forwards as fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.runtime.passes import forward
from blendrag.runtime.passes.forward import Lane, Part


class Rows(Lane):
    """A lane of that many rows."""

    def __init__(self, count):
        self.ids = self.positions = torch.arange(count)

    def attend(self, index, layer, part, q, k, v):
        raise NotImplementedError


def cut(counts, max_rows):
    """`(lane number, start, stop, last)` of each part, tile by tile."""
    lanes = [Rows(count) for count in counts]
    return [[(lanes.index(lane), part.rows.start, part.rows.stop, part.last) for lane, part in tile]
            for tile in forward.tiles(lanes, max_rows)]


@pytest.mark.parametrize(("counts", "max_rows", "tiles"), [
    ([], 8, []),
    ([0], 8, []),
    ([3], 8, [[(0, 0, 3, True)]]),
    ([8], 8, [[(0, 0, 8, True)]]),
    ([9], 8, [[(0, 0, 8, False)], [(0, 8, 9, True)]]),
    ([3, 5], 8, [[(0, 0, 3, True), (1, 0, 5, True)]]),
    ([3, 6], 8, [[(0, 0, 3, True), (1, 0, 5, False)], [(1, 5, 6, True)]]),
    ([5, 20, 2], 8, [[(0, 0, 5, True), (1, 0, 3, False)], [(1, 3, 11, False)], [(1, 11, 19, False)],
                     [(1, 19, 20, True), (2, 0, 2, True)]]),
    ([8, 8], 8, [[(0, 0, 8, True)], [(1, 0, 8, True)]]),
    ([2, 0, 2], 1, [[(0, 0, 1, False)], [(0, 1, 2, True)], [(2, 0, 1, False)], [(2, 1, 2, True)]]),
])
def test_lanes_are_cut_where_a_forward_is_full(counts, max_rows, tiles):
    assert cut(counts, max_rows) == tiles


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 20))
def test_every_row_runs_once_in_order_in_as_few_forwards_as_possible(counts, max_rows):
    tiles = cut(counts, max_rows)
    rows = [(lane, row) for tile in tiles for lane, start, stop, _ in tile for row in range(start, stop)]
    assert rows == [(lane, row) for lane, count in enumerate(counts) for row in range(count)]
    sizes = [sum(stop - start for _, start, stop, _ in tile) for tile in tiles]
    assert all(size == max_rows for size in sizes[:-1])
    assert all(0 < size <= max_rows for size in sizes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 20))
def test_a_lane_has_one_part_in_a_forward_and_its_last_part_says_so(counts, max_rows):
    tiles = cut(counts, max_rows)
    for tile in tiles:
        assert len({lane for lane, *_ in tile}) == len(tile)
        assert all(start < stop for _, start, stop, _ in tile)
    for number, count in enumerate(counts):
        ends = [last for tile in tiles for lane, _, _, last in tile if lane == number]
        assert ends == [False] * (len(ends) - 1) + [True] * bool(count)


def test_a_forward_that_runs_does_not_see_the_next_one():
    tiles = forward.tiles([Rows(5)], 2)
    first = next(tiles)
    next(tiles)
    assert [part for _, part in first] == [Part(slice(0, 2), last=False)]


def run(passes):
    """Rows of the forwards that passes ask for, each of which takes a second, and what comes of them."""
    forwards, seconds = [], None
    while True:
        try:
            forwards.append(forward.rows_of(passes.send(seconds)))
        except StopIteration as end:
            return forwards, end.value
        seconds = 1


@pytest.mark.parametrize(("rows", "sizes"), [(0, []), (1, [1]), (8, [8]), (9, [5, 4]), (17, [6, 6, 5])])
def test_the_passes_of_a_request_are_equal_parts(rows, sizes):
    """Of no rows there is none: what a policy chose may come down to nothing."""
    runner = forward.Forward.__new__(forward.Forward)
    runner.pass_rows = 8
    assert run(runner.passes(Rows(rows))) == (sizes, len(sizes))
