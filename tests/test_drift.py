"""What is not recomputed moves with what is: the averages, in every rotation, and in a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from blendrag.policies import CacheBlend, Layout, Query
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes import averages as averages_module
from blendrag.runtime.passes import blender as blender_module
from blendrag.runtime.passes.drift import Drift
from tests.test_blender import LAYERS, Model, Prompt, assert_same, attention, blend

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS, SIZE = 60, 2, 8
REUSED = [*range(10, 30), *range(33, 55)]
CHUNKS = ((10, 30), (33, 55))


class Turn(Rotation):
    """A rotation by a table, without a module of vLLM's around it; `magnitude` as YaRN has one."""

    def __init__(self, magnitude: float = 1.0, neox: bool = True) -> None:
        angles = torch.outer(torch.arange(TOKENS), torch.tensor([1.0, 0.1, 0.01]))
        self.cos, self.sin, self.neox = magnitude * angles.cos(), magnitude * angles.sin(), neox


def mask(*positions: int) -> torch.Tensor:
    found = torch.zeros(TOKENS, dtype=torch.bool)
    found[list(positions)] = True
    return found


def average(at: int, probes: list[int], changes: torch.Tensor, reach: float) -> torch.Tensor:
    """The weighted average of changes at a token: those of its chunk by distance, and the mean of all."""
    [chunk] = [range(start, end) for start, end in CHUNKS if start <= at < end]
    weights = torch.tensor([2.718281828 ** (-abs(at - probe) / reach) if probe in chunk else 0.0 for probe in probes])
    mean = changes.mean(0)
    return ((weights[:, None, None] * changes).sum(0) + mean / 2) / (weights.sum() + 0.5)


@pytest.mark.parametrize("rotation", [NoRotation(), Turn(), Turn(1.4), Turn(neox=False)],
                         ids=["none", "neox", "magnitude", "interleaved"])
@pytest.mark.parametrize("rows", [(0, 12, 13, 20, 28, 40, 58), (0, 12, 58)], ids=["both chunks", "one chunk"])
def test_stale_tokens_take_the_average_change_of_those_around_them(rows: tuple[int, ...], rotation: Any) -> None:
    random = torch.Generator().manual_seed(0)
    stored_k, stored_v, change_k, change_v = torch.randn(4, TOKENS, HEADS, SIZE, generator=random)
    everywhere, at = torch.arange(TOKENS), torch.tensor(rows)
    all_k, all_v = rotation.rotate(stored_k, everywhere).clone(), stored_v.clone()
    fresh_k = rotation.rotate(stored_k + change_k, everywhere)[at]
    layout = Layout(mask(*REUSED), CHUNKS)
    Drift(layout, mask(*rows), 5.0).apply(at, fresh_k, (stored_v + change_v)[at], all_k, all_v, rotation)
    probes = [row for row in rows if row in REUSED]
    for token in range(TOKENS):
        k, v = stored_k[token], stored_v[token]
        if token in REUSED and token not in rows:
            k = k + average(token, probes, change_k[probes], 5.0)
            v = v + average(token, probes, change_v[probes], 5.0)
        turned = rotation.rotate(k[None], torch.tensor([token]))[0]
        torch.testing.assert_close(all_k[token], turned, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(all_v[token], v, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [(0, 58), (0, *REUSED, 58)], ids=["nothing recomputed", "everything recomputed"])
def test_nothing_moves_where_nothing_is_known_or_stale(rows: tuple[int, ...]) -> None:
    all_k, all_v = torch.randn(2, TOKENS, HEADS, SIZE)
    before = all_k.clone(), all_v.clone()
    at = torch.tensor(rows)
    Drift(Layout(mask(*REUSED), CHUNKS), mask(*rows), 5.0).apply(
        at, torch.randn(len(at), HEADS, SIZE), torch.randn(len(at), HEADS, SIZE), all_k, all_v, NoRotation())
    assert torch.equal(all_k, before[0])
    assert torch.equal(all_v, before[1])


def test_long_chunks_are_looked_at_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages_module, "_BLOCK", 8)
    layout = Layout(mask(*range(10, 30)), ((10, 30),))
    all_v = torch.zeros(TOKENS, 1, 1)
    at = torch.tensor([10, 29])
    v = torch.tensor([1.0, 5.0]).view(2, 1, 1)
    Drift(layout, mask(10, 29), 1e9).apply(at, v, v, torch.zeros_like(all_v), all_v, NoRotation())
    # The block's own change counts as 1, where it has one, the mean of both as 1/2.
    for block, expected in ((slice(11, 18), 5 / 3), (slice(18, 26), 3.0), (slice(26, 29), 13 / 3)):
        torch.testing.assert_close(all_v[block].flatten(), torch.full_like(all_v[block].flatten(), expected))


def moved_along(model: Model, prompt: Prompt, chosen: torch.Tensor, reach: float) -> list[Any]:
    """One pass over the chosen rows, in which everything else takes averages."""
    rows = (chosen | ~prompt.stored).nonzero()[:, 0]
    x, found = model.embedding[prompt.ids[rows]], []
    for index in range(LAYERS):
        q, k, v = model.project(index, x)
        all_k, all_v = prompt.stored_kv(index)
        probes = chosen.nonzero()[:, 0]
        of = torch.searchsorted(rows, probes)
        before_k, before_v = all_k.clone(), all_v.clone()
        for placement in (p for p in prompt.placements if not p.exact):
            inside = (probes >= placement.start) & (probes < placement.end)
            for token in range(placement.start, placement.end):
                weights = torch.exp(-(probes - token).abs().double() / reach) * inside
                for target, before, fresh in ((all_k, before_k, k), (all_v, before_v, v)):
                    changes = fresh[of] - before[probes]
                    total = (weights[:, None, None] * changes).sum(0) + changes.mean(0) / 2
                    target[token] += total / (weights.sum() + 0.5)
        all_k[rows], all_v[rows] = k, v
        found.append((all_k, all_v))
        x = model.add(index, x, attention(q, all_k, all_v, torch.arange(prompt.tokens)[None] <= rows[:, None]))
    return found


@pytest.mark.parametrize("kept", [4 * 2**30, 0], ids=["layers kept", "not kept"])
def test_a_pass_moves_what_it_does_not_compute(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(blender_module, "_KEEP_BYTES", kept)
    model = Model()
    prompt = Prompt(model)
    chosen = torch.zeros(prompt.tokens, dtype=torch.bool)
    policy = replace(Query(0.2), reach=7.0)

    def select(self: Query, layout: Layout, scores: Any, step: int = 0) -> torch.Tensor:
        chosen[:] = layout.reused & (torch.arange(prompt.tokens) % 5 == 0)
        return chosen.clone()

    monkeypatch.setattr(Query, "select", select)
    [found], _ = blend(model, [prompt], [policy])
    assert_same(found, moved_along(model, prompt, chosen, 7.0), atol=1e-5)  # weights are float32


@pytest.mark.parametrize("kept", [4 * 2**30, 0], ids=["layers kept", "not kept"])
def test_rows_in_several_forwards_move_the_rest_once(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(blender_module, "_KEEP_BYTES", kept)
    found = {}
    for rows in (10_000, 17):
        model = Model(rows)
        prompt = Prompt(model)
        [found[rows]], _ = blend(model, [prompt], [Query(0.3)])
    stale = prompt.reused.nonzero()[:, 0]
    whole, parts, stored = found[10_000], found[17], [prompt.stored_kv(index) for index in range(LAYERS)]
    # In the second layer the changes are still the same: only later ones depend on what a part knew of the others.
    for mine, other in zip(parts[1], whole[1], strict=True):
        torch.testing.assert_close(mine[stale], other[stale], atol=1e-9, rtol=0)
    assert (whole[2][1][stale] - stored[2][1][stale]).abs().max() > 1e-3


def test_what_a_scoring_pass_computed_is_not_moved() -> None:
    model = Model()
    prompt = Prompt(model)
    policy = CacheBlend((0.6, 0.3), (1, 3))
    [plain], _ = blend(model, [prompt], [policy])
    [moved], _ = blend(model, [prompt], [replace(policy, reach=7.0)])
    for index in (0, 1):
        assert_same([moved[index]], [plain[index]])
    assert (moved[4][1] - plain[4][1]).abs().max() > 1e-3
