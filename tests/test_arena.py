"""Host memory is taken from the system in large pieces and used again and again."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from blendrag.store.arena import Arena, aligned

SLAB = 16 * 4096


@pytest.fixture
def arena() -> Arena:
    return Arena(lambda size: torch.zeros(size, dtype=torch.uint8), SLAB)


def test_pieces_do_not_overlap_and_memory_is_used_again(arena: Arena) -> None:
    chance = random.Random(1)
    held: list[tuple[torch.Tensor, int]] = []
    for number in range(2000):
        size = chance.randint(1, 5 * 4096)
        piece = arena.take(size)
        assert len(piece) == size
        held.append((piece.fill_(number % 251), number % 251))
        while sum(len(piece) for piece, _ in held) > 3 * SLAB:
            old, value = held.pop(chance.randrange(len(held)))
            assert (old == value).all()
            del old
    assert arena.slabs < 10


def test_memory_is_taken_as_long_as_a_view_of_it_lives(arena: Arena) -> None:
    view = arena.take(SLAB)[4096:4100].view(torch.float32)
    gc.collect()
    other = arena.take(SLAB)
    assert arena.slabs == 2
    assert not other.data_ptr() <= view.data_ptr() < other.data_ptr() + SLAB


def test_neighbours_that_came_back_are_one_gap(arena: Arena) -> None:
    pieces = [arena.take(4096) for _ in range(16)]
    start = pieces[0].data_ptr()
    del pieces[3:9]
    assert arena.take(6 * 4096).data_ptr() == start + 3 * 4096
    assert arena.slabs == 1


def test_what_is_larger_than_a_slab_has_its_own_and_empty_slabs_go(arena: Arena) -> None:
    pieces = [arena.take(3 * SLAB), arena.take(SLAB), arena.take(1)]
    assert arena.slabs == 3
    pieces.clear()
    arena.take(1)
    assert arena.slabs == 1


def test_a_system_without_memory_is_an_error_and_the_arena_goes_on() -> None:
    def allocate(size: int) -> torch.Tensor:
        if size > SLAB:
            raise RuntimeError("out of memory")
        return torch.zeros(size, dtype=torch.uint8)

    arena = Arena(allocate, SLAB)
    with pytest.raises(RuntimeError, match="out of memory"):
        arena.take(SLAB + 1)
    assert len(arena.take(10)) == 10
    assert (aligned(1), aligned(4096), aligned(4097)) == (4096, 4096, 8192)
