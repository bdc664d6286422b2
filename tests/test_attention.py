"""Attention of scattered rows equals the textbook's, whatever the rows, the window and the mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.runtime.passes.attention import attend, scores
from blendrag.runtime.passes.rows import Rows

pytestmark = pytest.mark.usefixtures("one_thread")


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def textbook(q, k, v, positions, valid, scale, window, soft_cap):
    """(weights [heads, rows, keys], outputs [rows, heads, head size]) in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = torch.einsum("rhd,khd->hrk", q, k) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    may_be_seen = [True] * len(k) if valid is None else valid.tolist()
    seen = [[key <= position and (not window or key > position - window) and may_be_seen[key] for key in range(len(k))]
            for position in positions.tolist()]
    logits[:, ~torch.tensor(seen)] = float("-inf")
    weights = logits.softmax(-1)
    return weights, torch.einsum("hrk,khd->rhd", weights, v)


def make(rows, keys, heads=4, kv_heads=2, size=16, dtype=torch.float32, seed=0):
    """q, k, v of that many rows and keys; large enough for the soft cap and the mask to matter."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, size, generator=random) for shape in ((rows, heads), *[(keys, kv_heads)] * 2))
    return (2 * q).to(dtype), (2 * k).to(dtype), v.to(dtype)


def scattered(count, keys, seed=0) -> torch.Tensor:
    """That many of the positions 0 to keys - 1, ascending."""
    return torch.randperm(keys, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def check(q, k, v, positions, valid=None, window=0, soft_cap=0.0, scale=0.25):
    _, expected = textbook(q, k, v, positions, valid, scale, window, soft_cap)
    found = attend(q, k, v, Rows(positions, len(k), valid), scale=scale, window=window, soft_cap=soft_cap)
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 8), (3, 1, 80)])
def test_scattered_rows_see_exactly_what_lies_before_them(heads, kv_heads, size, window, soft_cap, dtype):
    q, k, v = make(40, 150, heads, kv_heads, size, dtype)
    check(q, k, v, scattered(40, 150), window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [0, 1, 30, 200])
@pytest.mark.parametrize("count", [127, 128, 129, 260])
def test_more_rows_than_one_tile_make_no_difference(count, window):
    q, k, v = make(count, 300, 2, 1, 8)
    check(q, k, v, scattered(count, 300), window=window)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_over_any_context_equal_the_textbook(data):
    keys = data.draw(st.integers(1, 30))
    positions = sorted(data.draw(st.sets(st.integers(0, keys - 1), min_size=1)))
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys)))
    valid[positions] = True  # a row always sees itself
    q, k, v = make(len(positions), keys, seed=keys)
    check(q, k, v, torch.tensor(positions), data.draw(st.none() | st.just(valid)),
          window=data.draw(st.integers(0, 35)), soft_cap=data.draw(st.sampled_from([0.0, 3.0])))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 20])
def test_keys_that_are_not_valid_are_not_seen(window, soft_cap):
    q, k, v = make(30, 200)
    positions = scattered(30, 200)
    valid = torch.zeros(200, dtype=torch.bool)
    valid[positions] = True
    valid[50:120] = True
    k[~valid], v[~valid] = 1e4, 1e4
    check(q, k, v, positions, valid, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_nothing_leaks_from_the_future(soft_cap):
    q, k, v = make(200, 400)
    positions = scattered(200, 400)
    before = attend(q, k, v, Rows(positions, 400), scale=0.25, soft_cap=soft_cap)
    for row in (0, 50, 199):
        k2, v2 = k.clone(), v.clone()
        k2[positions[row] + 1 :], v2[positions[row] + 1 :] = 1e3, 1e3
        after = attend(q, k2, v2, Rows(positions, 400), scale=0.25, soft_cap=soft_cap)
        torch.testing.assert_close(after[: row + 1], before[: row + 1], atol=1e-6, rtol=0)


def test_the_first_and_the_last_row_alone():
    q, k, v = make(1, 300)
    check(q, k, v, torch.tensor([0]))
    check(q, k, v, torch.tensor([299]))
    only_itself = attend(q, k, v, Rows(torch.tensor([0]), 300), scale=0.25)
    torch.testing.assert_close(only_itself[0], v[0].repeat_interleave(2, 0))


def test_no_rows_give_no_output():
    q, k, v = make(0, 10)
    assert attend(q, k, v, Rows(torch.tensor([], dtype=torch.int64), 10), scale=0.25).shape == (0, 4, 16)


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_inputs_may_be_views_of_larger_tensors(dtype, soft_cap):
    packed = make(50, 50, 8, 8, 32, dtype)[0]  # q, k and v side by side, as a fused projection leaves them
    q, k, v = packed[:, :4, ::2], packed[:, 4:6, 16:], packed[:, 6:, :16]
    assert not any(tensor.is_contiguous() for tensor in (q, k, v))
    check(q, k, v, torch.arange(50), soft_cap=soft_cap)
    strided = make(100, 100, dtype=dtype)
    q, k, v = (tensor[::2] for tensor in strided)
    check(q, k.transpose(0, 1).contiguous().transpose(0, 1), v, torch.arange(50), soft_cap=soft_cap)


def test_inputs_are_left_alone():
    tensors = make(20, 60)
    copies = [tensor.clone() for tensor in tensors]
    attend(*tensors, Rows(scattered(20, 60), 60), scale=0.25, soft_cap=5.0)
    attend(*tensors, Rows(scattered(20, 60), 60), scale=0.25)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


# Masks.


def test_masks_are_made_once_for_all_layers_of_a_kind():
    rows = Rows(scattered(200, 400), 400)
    assert rows.masks(0, torch.float32) is rows.masks(0, torch.float32)
    assert rows.masks(8, torch.float32) is rows.masks(8, torch.float32)
    assert rows.masks(8, torch.float32) is not rows.masks(0, torch.float32)


@pytest.mark.parametrize("window", [0, 16])
def test_tiles_cover_the_rows_and_skip_keys_that_none_of_them_sees(window):
    positions = scattered(300, 1000)
    tiles = Rows(positions, 1000).masks(window, torch.float32)
    assert [row for rows, _, _ in tiles for row in range(rows.start, rows.stop)] == list(range(300))
    for rows, keys, mask in tiles:
        assert mask.shape == (rows.stop - rows.start, keys.stop - keys.start)
        seen = mask == 0
        assert seen[:, -1].any()
        assert seen[:, 0].any()
        assert seen.any(1).all()


# Weights, as scores of a token.


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_scores_are_the_textbooks_weights(kv_heads, window, soft_cap, dtype):
    q, k, v = make(30, 90, 4, kv_heads, 16, dtype)
    positions = scattered(30, 90)
    valid = torch.ones(90, dtype=torch.bool)
    valid[torch.tensor([n for n in range(0, 90, 3) if n not in positions])] = False
    rows = Rows(positions, 90, valid)
    found = scores(q, k, rows.visible(positions, 0, 90, window), scale=0.25, soft_cap=soft_cap)
    expected, _ = textbook(q, k, v, positions, valid, 0.25, window, soft_cap)
    assert (found.dtype, found.shape) == (torch.float32, (4, 30, 90))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.sum(-1), torch.ones(4, 30))
