"""The CUDA kernels, run by Triton's interpreter where there is no GPU: the same source, the same results."""

from __future__ import annotations

import pytest
import torch

from blendrag.policies import Layout
from blendrag.runtime.messages import Placement
from blendrag.runtime.model.rotation import NoRotation, Rotation
from blendrag.runtime.passes import triton_attention
from blendrag.runtime.passes.attention import attend, weights
from blendrag.runtime.passes.averages import Neighbours
from blendrag.runtime.passes.drift import Drift
from blendrag.runtime.passes.rows import Rows
from blendrag.runtime.passes.sparsity import Sparsity
from blendrag.runtime.passes.triton_attention import attend_triton
from blendrag.runtime.passes.triton_drift import DriftKernels
from blendrag.runtime.passes.triton_gather import Gather
from blendrag.runtime.passes.triton_scores import weights_triton
from blendrag.store import KVEntry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("window", "soft_cap", "holes"), [(0, 0.0, False), (40, 0.0, False), (0, 5.0, True),
                                                           (17, 3.0, True)])
def test_attention_kernel(window: int, soft_cap: float, holes: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    keys = 200
    positions = torch.randperm(keys, generator=generator)[:140].sort().values.to(DEVICE)
    q, k, v = (torch.randn(n, heads, 48, generator=generator).to(DEVICE) for n, heads in
               ((140, 6), (keys, 2), (keys, 2)))
    valid = None
    if holes:
        valid = (torch.rand(keys, generator=generator) > 0.3).to(DEVICE)
        valid[positions] = True
        k[~valid], v[~valid] = float("nan"), float("nan")  # whatever was in that memory before
    found = attend_triton(q, k, v, Rows(positions, keys, valid), scale=0.2, window=window, soft_cap=soft_cap)
    k, v = k.nan_to_num(), v.nan_to_num()
    expected = attend(q.cpu(), k.cpu(), v.cpu(), Rows(positions.cpu(), keys, None if valid is None else valid.cpu()),
                      scale=0.2, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3 if DEVICE.type == "cuda" else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize(("window", "sparse"), [(0, False), (90, False), (0, True)])
def test_attention_kernel_with_split_keys(rows: int, window: int, sparse: bool,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "_SPLIT_KEYS", 64)
    generator = torch.Generator().manual_seed(7)
    keys = 400
    positions = torch.randperm(keys, generator=generator)[:rows].sort().values
    q, k, v = (torch.randn(n, heads, 32, generator=generator) for n, heads in ((rows, 4), (keys, 2), (keys, 2)))
    sparsity = None
    if sparse:
        reused = torch.zeros(keys, dtype=torch.bool)
        reused[100:350] = True
        layout = Layout(reused, ((100, 200), (200, 350)))
        sparsity = Sparsity.choose(layout, torch.rand(keys, generator=generator), 64)
    expected = attend(q, k, v, Rows(positions, keys, None, sparsity), scale=0.3, window=window)
    if sparsity is not None:
        sparsity = Sparsity(sparsity.groups.to(DEVICE), sparsity.allowed.to(DEVICE))
    found = attend_triton(*(t.to(DEVICE) for t in (q, k, v)), Rows(positions.to(DEVICE), keys, None, sparsity),
                          scale=0.3, window=window, soft_cap=0.0)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3 if DEVICE.type == "cuda" else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("half", "start"), [(24, 0), (10, 0), (10, 28), (0, 0)])
def test_gather_kernel(neox: bool, half: int, start: int) -> None:
    generator = torch.Generator().manual_seed(5)
    rotation: Rotation | NoRotation = NoRotation()
    if half:
        angles = torch.rand(100, half, generator=generator)
        rotation = Rotation.__new__(Rotation)
        rotation.cos, rotation.sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        rotation.neox, rotation.start = neox, start
    entries = []
    for place, tokens, used in ((5, 20, 20), (40, 33, 30)):
        k, v = (torch.randn(3, tokens, 2, 48, generator=generator).to(DEVICE) for _ in range(2))
        entries.append((Placement(place, place + used, "key", exact=False), KVEntry(k, v)))
    found_k, found_v, expected_k, expected_v = (torch.zeros(80, 2, 48, device=DEVICE) for _ in range(4))
    Gather(entries, DEVICE).layer(1, rotation, found_k, found_v)
    for placement, entry in entries:
        at = torch.arange(placement.start, placement.end, device=DEVICE)
        expected_k[at] = rotation.rotate(entry.k[1, : len(at)], at)
        expected_v[at] = entry.v[1, : len(at)]
    torch.testing.assert_close(found_k, expected_k)
    torch.testing.assert_close(found_v, expected_v)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("half", "start"), [(24, 0), (10, 0), (10, 28), (0, 0)])
def test_drift_kernels(neox: bool, half: int, start: int) -> None:
    generator = torch.Generator().manual_seed(8)
    rotation: Rotation | NoRotation = NoRotation()
    if half:
        angles = torch.rand(120, half, generator=generator)
        rotation = Rotation.__new__(Rotation)
        rotation.cos, rotation.sin = 1.3 * angles.cos(), 1.3 * angles.sin()
        rotation.neox, rotation.start = neox, start
    reused = torch.zeros(120, dtype=torch.bool)
    reused[5:50], reused[60:110] = True, True
    rows = ~reused | (torch.rand(120, generator=generator) < 0.2)
    at = rows.nonzero()[:, 0]
    qkv = torch.randn(len(at), 9, 48, generator=generator)  # fresh keys and values are slices of what a layer projects
    fresh_k, fresh_v = qkv[:, 5:7], qkv[:, 7:]
    stored = torch.randn(2, 120, 2, 48, generator=generator)
    layout = Layout(reused, ((5, 50), (60, 110)))
    expected_k, expected_v = stored.clone()
    Drift(layout, rows, 9.0).apply(at, fresh_k, fresh_v, expected_k, expected_v, rotation)
    on_device = Layout(reused.to(DEVICE), layout.chunks)
    averages = Neighbours(on_device, rows.to(DEVICE), 9.0).averages(at.to(DEVICE), torch.float32)
    assert averages is not None
    if isinstance(rotation, Rotation):
        rotation.cos, rotation.sin = rotation.cos.to(DEVICE), rotation.sin.to(DEVICE)
    kernels = DriftKernels(averages)
    for _ in range(2):  # a second layer
        found_k, found_v = stored.clone().to(DEVICE)
        kernels.apply(fresh_k.to(DEVICE), fresh_v.to(DEVICE), found_k, found_v, rotation)
        torch.testing.assert_close(found_k.cpu(), expected_k, atol=1e-2 if DEVICE.type == "cuda" else 1e-5, rtol=1e-3)
        torch.testing.assert_close(found_v.cpu(), expected_v, atol=1e-2 if DEVICE.type == "cuda" else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize(("window", "soft_cap", "holes"), [(0, 0.0, False), (40, 0.0, True), (0, 5.0, True)])
def test_weights_kernels(heads: int, window: int, soft_cap: float, holes: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = 150
    positions = torch.randperm(keys, generator=generator)[:45].sort().values.to(DEVICE)
    q, k = (torch.randn(n, count, 48, generator=generator).to(DEVICE) for n, count in ((45, heads), (keys, 2)))
    valid = None
    if holes:
        valid = (torch.rand(keys, generator=generator) > 0.3).to(DEVICE)
        valid[positions] = True
    found = weights_triton(q, k, Rows(positions, keys, valid), scale=0.2, window=window, soft_cap=soft_cap)
    rows = Rows(positions.cpu(), keys, None if valid is None else valid.cpu())
    expected = weights(q.cpu(), k.cpu(), rows, scale=0.2, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3 if DEVICE.type == "cuda" else 1e-5, rtol=1e-3)


def test_gather_kernel_with_few_programs() -> None:
    generator = torch.Generator().manual_seed(6)
    entry = KVEntry(*(torch.randn(2, 70, 2, 32, generator=generator).to(DEVICE) for _ in range(2)))
    many, few = ([torch.zeros(80, 2, 32, device=DEVICE) for _ in range(2)] for _ in range(2))
    gather = Gather([(Placement(4, 60, "key", exact=False, offset=9), entry)], DEVICE)
    gather.layer(1, NoRotation(), *many)
    gather.layer(1, NoRotation(), *few, programs=2)
    torch.testing.assert_close(many, few)
    torch.testing.assert_close(many[1][4:60], entry.v[1, 9:65])
