"""Sparse rows see their group's blocks and recent ones, on the CPU and in the CUDA kernel; the rest is skipped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.policies import Layout
from blendrag.runtime.passes.attention import attend
from blendrag.runtime.passes.rows import Rows
from blendrag.runtime.passes.sparsity import BLOCK, Sparsity
from blendrag.runtime.passes.triton_attention import attend_triton
from tests.test_attention import make, scattered

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def layout(tokens: int, *chunks: tuple[int, int]) -> Layout:
    reused = torch.zeros(tokens, dtype=torch.bool)
    for start, end in chunks:
        reused[start:end] = True
    return Layout(reused, chunks)


def mask(sparsity: Sparsity, tokens: int) -> torch.Tensor:
    """bool [tokens, tokens], pair by pair."""
    allowed, groups = sparsity.allowed.tolist(), sparsity.groups.tolist()
    return torch.tensor([[key <= row and (allowed[groups[row]][key // BLOCK] or key // BLOCK >= row // BLOCK - 1)
                          for key in range(tokens)] for row in range(tokens)])


def textbook(q, k, v, seen, scale=0.25, soft_cap=0.0):
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = torch.einsum("rhd,khd->hrk", q, k) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return torch.einsum("hrk,khd->rhd", logits.masked_fill(~seen, float("-inf")).softmax(-1), v)


# Which blocks.


def test_a_chunks_rows_see_the_prefix_their_chunk_and_the_best_blocks():
    scores = torch.zeros(640)
    scores[[330, 460, 470]] = torch.tensor([3.0, 2.0, 2.0])  # blocks 5 and 7
    found = Sparsity.choose(layout(640, (70, 200), (205, 260), (270, 600)), scores, 64)
    assert found is not None
    assert found.allowed.int().tolist() == [[1, 1, 1, 1, 0, 0, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0, 0, 1, 0, 0],
                                            [1, 1, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 10]
    assert [int(found.groups[at]) for at in (0, 69, 70, 199, 200, 205, 260, 599, 600, 639)] == [
        3, 3, 0, 0, 3, 1, 3, 2, 3, 3]
    both = Sparsity.choose(layout(640, (70, 200)), scores, 128)
    assert both is not None
    assert both.allowed[0].int().tolist() == [1, 1, 1, 1, 0, 1, 0, 1, 0, 0]


def test_the_first_block_is_seen_though_there_is_no_prefix():
    found = Sparsity.choose(layout(300, (0, 100), (100, 290)), torch.ones(300), 0)
    assert found is not None
    assert found.allowed.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1] * 5]


def test_a_budget_of_all_tokens_or_no_chunks_is_no_sparsity():
    assert Sparsity.choose(layout(300, (10, 100)), torch.ones(300), 300) is None
    assert Sparsity.choose(layout(300, (10, 100)), torch.ones(300), 299) is not None
    assert Sparsity.choose(layout(300), torch.ones(300), 0) is None


@settings(deadline=None)
@given(st.data())
def test_the_budget_is_kept_and_more_of_it_shows_more(data):
    tokens = data.draw(st.integers(2, 700))
    start = data.draw(st.integers(0, tokens - 2))
    chunks = layout(tokens, (start, data.draw(st.integers(start + 1, tokens - 1))))
    scores = torch.rand(tokens, generator=torch.Generator().manual_seed(tokens))
    budgets = sorted(data.draw(st.lists(st.integers(0, tokens - 1), min_size=2, max_size=2)))
    less, more = (Sparsity.choose(chunks, scores, budget) for budget in budgets)
    none = Sparsity.choose(chunks, scores, 0)
    for found, budget in ((less, budgets[0]), (more, budgets[1])):
        assert int((found.allowed & ~none.allowed)[0].sum()) * BLOCK <= budget
    assert not (less.allowed & ~more.allowed).any()


# Attention.


@st.composite
def sparse_rows(draw):
    """(rows, bool [rows, keys] that says what they see)."""
    tokens = draw(st.integers(1, 420))
    cuts = sorted(draw(st.sets(st.integers(0, tokens), max_size=6)))
    groups = torch.bucketize(torch.arange(tokens), torch.tensor(cuts, dtype=torch.int64), right=True)
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    allowed = torch.rand(len(cuts) + 1, -(-tokens // BLOCK), generator=random) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    allowed[-1] = True
    order = torch.randperm(len(allowed), generator=random)
    order = torch.cat([order[order != len(cuts)], order[order == len(cuts)]])
    sparsity = Sparsity(order[groups], allowed)
    positions = torch.tensor(sorted(draw(st.sets(st.integers(0, tokens - 1), min_size=1, max_size=300))))
    valid = None
    if draw(st.booleans()):
        valid = torch.rand(tokens, generator=random) < 0.7
        valid[positions] = True
    window = draw(st.sampled_from([0, 1, 40, 100]))
    seen = mask(sparsity, tokens)
    if window:
        seen &= torch.ones(tokens, tokens).triu(1 - window).bool()
    if valid is not None:
        seen &= valid
    return Rows(positions, tokens, valid, sparsity), window, seen[positions]


@settings(max_examples=60, deadline=None)
@given(sparse_rows(), st.sampled_from([0.0, 4.0]))
def test_any_sparsity_equals_the_textbook(case, soft_cap):
    rows, window, seen = case
    q, k, v = make(len(rows.positions), rows.keys, 2, 1, 8)
    found = attend(q, k, v, rows, scale=0.25, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(found.double(), textbook(q, k, v, seen, soft_cap=soft_cap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "window", "soft_cap", "holes"), [
    (torch.float32, 0, 0.0, False), (torch.float32, 100, 4.0, True), (torch.float16, 0, 0.0, True),
    (torch.float16, 150, 0.0, False)])
def test_the_kernel_equals_the_cpu(dtype, window, soft_cap, holes):
    chunks = layout(400, (20, 90), (95, 230), (235, 380))
    positions = scattered(150, 400)
    valid = None
    if holes:
        valid = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.7
        valid[positions] = True
    rows = Rows(positions, 400, valid, Sparsity.choose(chunks, torch.rand(400), 64))
    q, k, v = make(len(rows.positions), rows.keys, 2, 1, 16, dtype)
    expected = attend(q, k, v, rows, scale=0.25, window=window, soft_cap=soft_cap)
    there = Rows(rows.positions.to(DEVICE), rows.keys, None if rows.valid is None else rows.valid.to(DEVICE),
                 Sparsity(rows.sparsity.groups.to(DEVICE), rows.sparsity.allowed.to(DEVICE)))
    found = attend_triton(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), there, scale=0.25, window=window, soft_cap=soft_cap)
    tolerance = 3e-2 if dtype == torch.float16 else 2e-3 if DEVICE.type == "cuda" else 1e-5
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_all_blocks_allowed_is_dense_attention():
    positions = scattered(200, 500)
    q, k, v = make(200, 500)
    everything = Sparsity(torch.zeros(500, dtype=torch.int64), torch.ones(2, 8, dtype=torch.bool))
    for window in (0, 90):
        dense = attend(q, k, v, Rows(positions, 500), scale=0.25, window=window)
        for run in (attend, attend_triton):
            found = run(q, k, v, Rows(positions, 500, None, everything), scale=0.25, window=window, soft_cap=0.0)
            torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-5)


# Savings.


def chunked(tokens: int = 2000, budget: int = 128) -> Rows:
    """Every fifth token of chunks of 190 tokens, the text between them and at the end."""
    chunks = layout(tokens, *((start, start + 190) for start in range(100, tokens - 200, 200)))
    positions = (~chunks.reused | (torch.arange(tokens) % 5 == 0)).nonzero()[:, 0]
    scores = torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    return Rows(positions, tokens, None, Sparsity.choose(chunks, scores, budget))


def test_tiles_leave_out_keys_that_none_of_their_rows_sees():
    rows = chunked()
    tiles = rows.masks(0, torch.float32)
    order = torch.cat([tile for tile, _, _ in tiles])
    assert sorted(order.tolist()) == list(range(len(rows.positions)))
    assert all((seen == 0).any(0).all() and (seen == 0).any(1).all() for _, _, seen in tiles)
    sparse = [tile for tile in tiles if (rows.sparsity.groups[rows.positions[tile[0]]] < 9).all()]
    assert len(sparse) > 4
    assert all(seen.shape[1] < 1000 for _, _, seen in sparse)


@pytest.mark.parametrize("window", [0, 300])
def test_the_kernel_reads_the_blocks_that_some_row_of_a_row_block_sees(window):
    rows = chunked()
    order, groups, blocks, counts = rows.blocks(window, 64)
    assert torch.equal(groups, rows.sparsity.groups[rows.positions])
    positions = rows.positions[order]
    seen = rows.visible(positions, 0, rows.keys, window)
    for number, (listed, count) in enumerate(zip(blocks.tolist(), counts.tolist(), strict=True)):
        wanted = seen[number * 64 : (number + 1) * 64].any(0).nonzero()[:, 0].div(BLOCK, rounding_mode="floor").unique()
        assert set(wanted.tolist()) <= set(listed[:count])
        assert count <= len(wanted) + 2  # a block may be seen in part, and by no row of these in the part that is seen
        assert listed[:count] == sorted(listed[:count])
