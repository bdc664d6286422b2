"""Chunks are found in a prompt by their tokens: what is reported is there, and nothing longer was overlooked."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blendrag.errors import StoreError
from blendrag.store import compare, prefix_digest, windows
from blendrag.store.compare import LEFT_EDGE, PARTIAL, Look
from blendrag.store.index import ContentIndex, Match
from blendrag.store.windows import WINDOW, HashFilter, chunk_bytes, prompt_ids, window_hash, window_hashes

P, Q = prefix_digest([1]), prefix_digest([2])


def index_of(*chunks):
    index = ContentIndex()
    for number, chunk in enumerate(chunks):
        index.add(f"k{number}", P, chunk)
    return index


def text(number, tokens=40):
    """A chunk that shares no token with another."""
    return list(range(1000 * number, 1000 * number + tokens))


def found(index, prompt):
    """What was found, as (start, end, offset, key)."""
    return [(m.start, m.end, m.offset, next(iter(m.variants.values()))) for m in index.find(prompt)]


# What is found.


def test_chunks_are_found_wherever_they_are():
    index = index_of(text(1), text(2), text(3))
    prompt = [7, *text(2), 8, 9, *text(1), *text(3), *text(2)]
    assert index.find(prompt)[0] == Match(1, 41, 0, 40, {P: "k1"})
    assert found(index, prompt) == [(1, 41, 0, "k1"), (43, 83, 0, "k0"), (83, 123, 0, "k2"), (123, 163, 0, "k1")]
    assert found(index, [7] * 100) == found(index, []) == found(index, text(1)[:15]) == []


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda ids: np.array(ids, np.int32)])
def test_token_ids_may_come_in_any_form(form):
    index = ContentIndex()
    index.add("k", P, form(text(1)))
    assert found(index, form([5, *text(1)])) == [(1, 41, 0, "k")]


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (0, 1), (3, 2), (8, 16)])
def test_edges_that_were_merged_differently_are_left_out(left, right):
    chunk = text(1)
    prompt = [5, *[99999] * left, *chunk[left : 40 - right], *[99999] * right, 6]
    assert found(index_of(chunk), prompt) == [(1 + left, 41 - right, left, "k0")]


def test_merging_may_change_the_number_of_tokens():
    chunk = text(1)
    assert found(index_of(chunk), [5, 99999, *chunk[3:-1], 99998, 6]) == [(2, 38, 3, "k0")]


def test_a_chunk_that_lacks_more_at_the_left_is_not_found():
    chunk = text(1, 400)
    index = index_of(text(2), chunk[:100])  # no other chunk takes its anchor
    index.add("long", P, chunk)
    assert [offset for *_, offset, _ in found(index, [5, *chunk[LEFT_EDGE:]])] == [8]
    assert found(index, [5, *chunk[LEFT_EDGE + 1 :]]) == []


def test_a_prompt_that_was_cut_matches_up_to_its_end():
    assert found(index_of(text(1)), [5, *text(1)[:30]]) == [(1, 31, 0, "k0")]


def test_short_chunks_are_not_found_and_the_shortest_long_enough_is():
    index = index_of(text(1, 15), text(2, 16))
    assert found(index, [*text(1, 15), *text(2, 16)]) == [(15, 31, 0, "k1")]
    assert "k0" not in index


def test_the_longest_of_overlapping_chunks_counts_then_the_first():
    long, first, second = text(1, 200), text(1, 200)[:60], text(1, 200)[120:]
    for chunks in ([long, first, second], [second, first, long]):
        index = index_of(*chunks)
        assert [m.tokens for m in index.find([5, *long])] == [200]
        assert [m.tokens for m in index.find([5, *long[:150]])] == [200]
    half, other = text(2, 60), text(2, 60)[30:] + text(3, 30)
    assert found(index_of(half, other), [*half, *text(3, 30)]) == [(0, 60, 0, "k0")]


def test_thousands_of_chunks_with_the_same_header_are_found():
    chunks = [text(0, 64) + text(number, 40) for number in range(1, 2000)]
    index = index_of(*chunks)
    assert found(index, [*chunks[1500], *chunks[0], *chunks[700]]) == [
        (0, 104, 0, "k1500"), (104, 208, 0, "k0"), (208, 312, 0, "k700")]


def test_ids_that_are_none_are_not_found_and_not_stored():
    index = index_of(text(1))
    for strange in (-1, 2**31, 2**32 - 1, 2**40, -(2**70)):
        assert found(index, [strange, *text(1), strange]) == [(1, 41, 0, "k0")]
        with pytest.raises(StoreError, match="between 0 and 2"):
            index.add("k", P, [strange, *text(1)])
    for wrong in (["a"], [1.5] * 20, [[1], [2]], np.ones((2, 2), int), np.ones(3)):
        with pytest.raises(StoreError, match="flat sequence of whole numbers"):
            index.find(wrong)


# Variants and removal.


def test_a_chunk_stored_behind_several_prefixes_is_one_match():
    index = ContentIndex()
    index.add("a", P, text(1))
    index.add("b", Q, text(1))
    assert index.find(text(1)) == [Match(0, 40, 0, 40, {P: "a", Q: "b"})]
    assert index.remove("a")
    assert index.find(text(1)) == [Match(0, 40, 0, 40, {Q: "b"})]
    assert index.remove("b")
    assert not index.remove("b")
    assert index.find(text(1)) == []
    assert len(index) == 0


def test_a_match_is_not_changed_by_what_happens_later():
    index = index_of(text(1))
    match = index.find(text(1))[0]
    index.remove("k0")
    assert match.variants == {P: "k0"}


def test_adding_again_replaces():
    index = index_of(text(1), text(2))
    index.add("k0", Q, text(3))
    assert found(index, [*text(1), *text(2), *text(3)]) == [(40, 80, 0, "k1"), (80, 120, 0, "k0")]


def test_what_is_removed_and_added_for_long_needs_no_more_memory_than_what_is_there():
    index = ContentIndex()
    for number in range(20_000):
        index.add(f"k{number}", P, text(number, 16))
        index.remove(f"k{number - 10}")
    assert len(index) == len(index._contents) == len(index._single) == 10
    assert len(index._filter._bits) == 2**13
    assert found(index, text(19_995, 16)) == [(0, 16, 0, "k19995")]


# Against a naive search.


def naive(index, prompt):
    """Compares every chunk with the prompt at every place of its anchor."""
    runs, passed = [], {}
    for place in range(len(prompt) - WINDOW + 1):
        value = windows.window_hash(prompt[place : place + WINDOW])
        if value in index._single:
            runs += agree(index._single[value], prompt, place)
        bucket = sorted(index._shared.get(value, []), key=lambda content: -content.tokens)
        behind, length = passed.get(value, (0, 0))
        found = [run for rank, content in enumerate(bucket) for run in agree(content, prompt, place)
                 if (place >= behind or (rank < PARTIAL and run[1] - run[0] > length))
                 and (rank < PARTIAL or run[1] - run[0] == content.tokens)]
        if found:
            best = max(found, key=lambda run: run[1] - run[0])
            runs.append(best)
            passed[value] = best[1] + min(content.anchor for content in bucket), best[1] - best[0]
    kept = []
    for run in sorted(runs, key=lambda run: (run[0] - run[1], run[0], run[3].tokens, run[3].raw)):
        if all(run[1] <= other[0] or other[1] <= run[0] for other in kept):
            kept.append(run)
    return [Match(start, end, offset, content.tokens, content.variants)
            for start, end, offset, content in sorted(kept, key=lambda run: run[0])]


def agree(content, prompt, place):
    """The run around an anchor at `place`, if it is one."""
    chunk = np.frombuffer(content.raw, "<u4").tolist()
    origin = place - content.anchor
    start = end = place
    while start > max(origin, 0) and prompt[start - 1] == chunk[start - 1 - origin]:
        start -= 1
    while end < min(origin + len(chunk), len(prompt)) and prompt[end] == chunk[end - origin]:
        end += 1
    right = end - place >= WINDOW and start - origin <= LEFT_EDGE
    return [(start, end, start - origin, content)] if right else []


def check(index, chunks, prompt):
    """The matches are what a naive search finds, true, apart, and hide no chunk that is longer than they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_WORK", 2**40)  # a naive search does not give up
        matches = index.find(prompt)
    assert matches == naive(index, prompt)
    for match in matches:
        chunk = chunks[next(iter(match.variants.values()))]
        assert prompt[match.start : match.end] == chunk[match.offset : match.offset + match.end - match.start]
        assert match.end - match.start >= WINDOW
        assert (match.offset <= LEFT_EDGE, match.tokens) == (True, len(chunk))
    assert all(left.end <= right.start for left, right in pairwise(matches))
    unique = {key: chunk for key, chunk in chunks.items() if key in index and index._keys[key].single}
    for chunk in unique.values():
        for start in range(len(prompt) - len(chunk) + 1):
            if prompt[start : start + len(chunk)] == chunk:
                assert any(m.start < start + len(chunk) and start < m.end and m.end - m.start >= len(chunk)
                           for m in matches)


@st.composite
def stores_and_prompts(draw):
    """Chunks of few tokens, of parts in common and of repetitions, and prompts made of them and their pieces."""
    token = st.integers(0, draw(st.sampled_from([1, 3, 30, 10**6])))
    parts = draw(st.lists(st.lists(token, min_size=1, max_size=30), min_size=1, max_size=6))
    chunk = st.lists(st.sampled_from(parts), min_size=1, max_size=5).map(lambda found: [*chain(*found)])
    chunks = draw(st.lists(chunk, min_size=1, max_size=10))
    piece = st.builds(lambda ids, a, b: ids[a : len(ids) - b], st.sampled_from(chunks), st.integers(0, 10),
                      st.integers(0, 10))
    prompt = draw(st.lists(st.one_of(st.sampled_from(chunks), piece, st.lists(token, max_size=4)), max_size=8))
    removed = draw(st.sets(st.integers(0, len(chunks) - 1)))
    return chunks, [*chain(*prompt)], removed


@settings(max_examples=300, deadline=None)
@given(stores_and_prompts())
def test_matches_equal_a_naive_search(case):
    chunks, prompt, removed = case
    index = index_of(*chunks)
    named = {f"k{number}": chunk for number, chunk in enumerate(chunks)}
    check(index, named, prompt)
    for number in removed:
        index.remove(f"k{number}")
    check(index, named, prompt)


def zeros(length, *ones):
    return [int(at in ones) for at in range(length)]


ALIKE = ([zeros(8), zeros(28, 27), zeros(48, 19, 39), zeros(64, 19, 47), zeros(8), zeros(44, 43), zeros(48, 27, 47)],
         zeros(252, 43, 63, 83, 135, 179, 223, 251), set())
"""So much alike that a look-up would have given up before its end."""


@settings(max_examples=100, deadline=None)
@given(stores_and_prompts())
@example(ALIKE)
def test_matches_are_right_when_every_hash_collides(case):
    chunks, prompt, _ = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "window_hash", lambda _: 7)
        patch.setattr(windows, "window_hashes", lambda ids: np.full(len(ids) - WINDOW + 1, 7, np.uint32))
        check(index_of(*chunks), {f"k{number}": chunk for number, chunk in enumerate(chunks)}, prompt)


# Input that is meant to be slow.


@pytest.fixture
def work(monkeypatch):
    """What is left of the work that each look-up may be; negative by one comparison at most."""
    left, init = [], Look.__init__
    monkeypatch.setattr(Look, "__init__", lambda look, prompt: init(look, prompt) or left.append(look))
    return lambda: [look.work for look in left]


@pytest.mark.parametrize("period", [1, 2, 7, 16, 31])
def test_repetitions_are_covered_and_do_not_take_forever(period, work):
    prompt = [token % period for token in range(32_768)]
    chunks = [prompt[start : start + length] for length in range(100, 500, 7) for start in range(min(period, 5))]
    index = index_of(*chunks)
    matches = index.find(prompt)
    assert sum(m.end - m.start for m in matches) > 0.8 * len(prompt)
    assert min(work()) > -200


def test_the_anchor_of_a_chunk_among_many_that_only_look_like_it_costs_a_bounded_number_of_looks(work):
    base = list(range(WINDOW))
    chunks = [[900_000 + turn] * 8 + base[turn:] + base[:turn] + [900_100 + turn] * 8 for turn in range(WINDOW)]
    index = index_of(*chunks)
    prompt = [*base * 2047, *chunks[3][:16]]
    matches = index.find(prompt)
    assert matches
    assert all((m.tokens, m.end - m.start) == (32, 16) for m in matches)
    assert min(work()) > -200


# Hashes and their filter.


@given(st.lists(st.integers(0, windows.MAX_ID), min_size=WINDOW, max_size=80))
def test_the_hash_of_a_window_does_not_depend_on_how_it_is_made(ids):
    hashes = window_hashes(prompt_ids(ids))
    assert hashes.tolist() == [window_hash(ids[at : at + WINDOW]) for at in range(len(ids) - WINDOW + 1)]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_the_filter_knows_all_that_was_added(first, then):
    known = HashFilter(first)
    for value in then:
        known.add(value)
    added = np.array(first + then, np.uint32)
    assert known.possible(added).tolist() == list(range(len(added)))


def test_the_filter_knows_little_else():
    chance = np.random.default_rng(0)
    hashes = chance.integers(0, 2**32, 200_000, np.uint32)
    known = HashFilter(hashes[:60_000].tolist())
    while not known.full:
        known.add(int(chance.integers(2**32)))
    assert len(known.possible(hashes[100_000:])) < 100_000 / 50


def test_ids_are_stored_as_little_endian_bytes():
    assert chunk_bytes([1, 258]) == b"\1\0\0\0\2\1\0\0"
