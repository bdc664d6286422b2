"""Chunks in an order in which prompts begin alike."""

from __future__ import annotations

import pytest

from blendrag import BlendPrompt, Chunk
from blendrag.ordering import ChunkOrder


def prompt(chunks: str, prefix: str = "Read: ") -> BlendPrompt:
    parts = [part for name in chunks for part in (Chunk(name), ", ")]
    return BlendPrompt(prefix, *parts, "end", add_special_tokens=False)


def arranged(order: ChunkOrder, chunks: str, prefix: str = "Read: ") -> str:
    return "".join(order.arrange(prompt(chunks, prefix)).chunks)


def test_a_first_prompt_keeps_its_order() -> None:
    order = ChunkOrder()
    given = prompt("cab")
    assert order.arrange(given) == given


def test_the_same_chunks_come_in_the_same_order() -> None:
    order = ChunkOrder()
    assert [arranged(order, chunks) for chunks in ("cab", "abc", "bca")] == ["cab"] * 3


def test_a_prompt_follows_the_path_of_most_and_goes_on_by_itself() -> None:
    order = ChunkOrder()
    for chunks in ("abx", "aby", "cbz", "abw"):
        arranged(order, chunks)
    assert arranged(order, "qcba") == "abqc"
    assert arranged(order, "bzc") == "cbz"


def test_what_stands_between_the_chunks_stays() -> None:
    order = ChunkOrder()
    arranged(order, "ab")
    assert order.arrange(prompt("ba")) == prompt("ab")


def test_prompts_with_another_prefix_have_orders_of_their_own() -> None:
    order = ChunkOrder()
    arranged(order, "ab")
    assert arranged(order, "ba", "Look at: ") == "ba"


def test_a_chunk_may_come_twice() -> None:
    order = ChunkOrder()
    arranged(order, "aab")
    assert arranged(order, "baa") == "aab"


@pytest.mark.parametrize("most", [10, 100])
def test_old_paths_are_forgotten(most: int) -> None:
    order = ChunkOrder(most)
    for number in range(200):
        arranged(order, "xy", f"prompt {number}")
        arranged(order, "ab")
    assert order._nodes <= most + 2
    assert arranged(order, "ba") == "ab"
    assert arranged(order, "yx", "prompt 0") == "yx"
