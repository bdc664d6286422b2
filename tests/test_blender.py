"""What a blend writes to the paged cache equals the policy's textbook, computed in one pass over a small model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendrag.policies import CacheBlend, First, Full, NoRecompute, Policy, Query
from blendrag.runtime.messages import BlendJob, Placement
from blendrag.runtime.model.rotation import NoRotation
from blendrag.runtime.passes import blender as blender_module
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.forward import Tile, tiles
from blendrag.runtime.passes.pass_queue import PassQueue
from blendrag.store import KVEntry

LAYERS, HEADS, KV_HEADS, SIZE, WIDTH, VOCABULARY, BLOCK_SIZE = 6, 4, 2, 8, 24, 97, 4
KV = list[tuple[torch.Tensor, torch.Tensor]]


pytestmark = pytest.mark.usefixtures("one_thread")


class Cache:
    """One layer's paged cache, and the backend that writes it."""

    scale = SIZE**-0.5

    def __init__(self) -> None:
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def do_kv_cache_update(self, attention: Any, k: torch.Tensor, v: torch.Tensor, kv_cache: Any,
                           slots: torch.Tensor) -> None:
        self.written |= dict(zip(slots.tolist(), zip(k.clone(), v.clone(), strict=True), strict=True))


class Model:
    """A transformer in float64, run the way `Forward` runs vLLM's, at most `max_rows` rows at a time."""

    def __init__(self, max_rows: int = 10_000) -> None:
        random = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64) * 0.4

        self.device, self.dtype, self.max_rows = torch.device("cpu"), torch.float64, max_rows
        self.embedding = 2 * weight(VOCABULARY, WIDTH)
        self.qkv = [weight(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE) for _ in range(LAYERS)]
        self.out = [weight(HEADS * SIZE, WIDTH) for _ in range(LAYERS)]
        self.layers = [SimpleNamespace(
            attention=SimpleNamespace(num_kv_heads=KV_HEADS, head_size=SIZE, kv_cache=None), impl=(cache := Cache()),
            rotation=NoRotation(), group=0, block_size=BLOCK_SIZE, window=0, soft_cap=0.0, scale=cache.scale)
            for _ in range(LAYERS)]

    def project(self, index: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = torch.nn.functional.rms_norm(x, (WIDTH,))
        return (normed @ self.qkv[index]).view(len(x), -1, SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)

    def add(self, index: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return x + attended.flatten(1) @ self.out[index]

    def run(self, lanes: Any) -> None:
        for tile in tiles(lanes, self.max_rows):
            self.timed_tile(tile)

    def passes(self, lane: Any) -> Any:
        yield from tiles([lane], self.max_rows)
        return 0.0

    def timed_tile(self, tile: Tile) -> float:
        going = {lane: self.embedding[lane.ids[part.rows]] for lane, part in tile}
        for index, layer in enumerate(self.layers):
            for lane, part in tile:
                if lane in going:
                    attended = lane.attend(index, layer, part, *self.project(index, going[lane]))
                    if attended is None:
                        del going[lane]
                    else:
                        going[lane] = self.add(index, going[lane], attended)
        for lane, part in tile:
            if lane in going:
                self.end(lane, part, going[lane])
        return 0.0

    def end(self, lane: Any, part: Any, x: torch.Tensor) -> None:
        """A part went through all layers."""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    logits = torch.einsum("rhd,khd->hrk", q, k) * SIZE**-0.5
    return torch.einsum("hrk,khd->rhd", logits.masked_fill(~seen, float("-inf")).softmax(-1), v)


def prefill(model: Model, ids: torch.Tensor) -> KV:
    """K and V of each layer."""
    x, found, rows = model.embedding[ids], [], torch.arange(len(ids))
    for index in range(LAYERS):
        q, k, v = model.project(index, x)
        found.append((k, v))
        x = model.add(index, x, attention(q, k, v, rows[None] <= rows[:, None]))
    return found


class Prompt:
    """An exact prefix, then chunks between new text, then a question; with all that a blender needs of it."""

    def __init__(self, model: Model, lengths: tuple[int, ...] = (30, 25, 40), prefix: int = 10, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def text(count: int) -> torch.Tensor:
            return torch.randint(VOCABULARY, (count,), generator=random)

        self.pieces: list[tuple[Placement, torch.Tensor, int]] = []
        self.entries: dict[str, Any] = {}  # the store takes no float64
        parts, at, sink = [text(prefix)], prefix, text(1)
        if prefix:
            self._store(model, Placement(0, prefix, f"{seed}-prefix", exact=True), parts[0][:0], parts[0])
        for number, length in enumerate(lengths):
            chunk = text(length)
            self._store(model, Placement(at, at + length, f"{seed}-{number}", exact=False), sink, chunk)
            parts += [chunk, text(3)]
            at += length + 3
        self.ids = torch.cat([*parts, text(9)])
        self.tokens = len(self.ids)
        self.question_start = at
        self.stored, self.reused = (torch.zeros(self.tokens, dtype=torch.bool) for _ in range(2))
        for placement in self.placements:
            self.stored[placement.start : placement.end] = True
            self.reused[placement.start : placement.end] = not placement.exact

    @property
    def placements(self) -> list[Placement]:
        return [placement for placement, _, _ in self.pieces]

    def _store(self, model: Model, placement: Placement, before: torch.Tensor, ids: torch.Tensor) -> None:
        self.pieces.append((placement, ids, len(before)))
        layers = [(k[len(before) :], v[len(before) :]) for k, v in prefill(model, torch.cat([before, ids]))]
        k, v = (torch.stack(tensors).contiguous() for tensors in zip(*layers, strict=True))
        self.entries[placement.key] = SimpleNamespace(k=k, v=v)

    def stored_kv(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.zeros(self.tokens, KV_HEADS, SIZE, dtype=torch.float64) for _ in range(2))
        for placement in self.placements:
            at = slice(placement.start, placement.end)
            k[at], v[at] = self.entries[placement.key].k[index], self.entries[placement.key].v[index]
        return k, v

    def job(self, policy: Policy, first_block: int = 0) -> BlendJob:
        blocks = list(range(first_block, first_block + -(-self.tokens // BLOCK_SIZE)))[::-1]
        return BlendJob(f"request {first_block}", self.ids.numpy(), self.placements, self.question_start, policy,
                        0, (blocks,))


class Ranks:
    """One rank, which counts the meetings."""

    size = 1

    def __init__(self) -> None:
        self.totals = self.firsts = 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        self.totals += 1
        return tensor

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        self.firsts += 1
        return tensor


def blend(model: Model, prompts: list[Prompt], policies: list[Policy], sparse: int | None = None,
          ranks: Ranks | None = None) -> tuple[list[KV], list[Any]]:
    """What lies in the paged cache afterwards, prompt by prompt, and the reports."""
    entries = {key: entry for prompt in prompts for key, entry in prompt.entries.items()}
    source: Any = SimpleNamespace(ranks=ranks or Ranks(), tier=None, fingerprint="",
                                  ready=lambda needs, _: [True] * len(needs), release=lambda request_id: None,
                                  load=lambda keys, _: [entries[key] for key in keys])
    runs: Any = model
    jobs = [prompt.job(policy, 1000 * number)
            for number, (prompt, policy) in enumerate(zip(prompts, policies, strict=True))]
    queue = PassQueue(Blender(runs, runs, source, sparse), 1000)
    queue.add(jobs)
    by_request = queue.advance(10**9)
    reports = [by_request[job.request_id] for job in jobs]
    assert [report.failure for report in reports] == [""] * len(jobs)
    found = []
    for prompt, job in zip(prompts, jobs, strict=True):
        slots = [job.block_ids[0][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(prompt.tokens)]
        written = [layer.impl.written for layer in model.layers]
        found.append([tuple(torch.stack([layer[slot][i] for slot in slots]) for i in (0, 1)) for layer in written])
    return found, reports


def gradual_filtering(model: Model, prompt: Prompt, policy: CacheBlend) -> KV:
    """CacheBlend in one pass, which leaves rows behind at each check layer."""
    ratios = policy.ratio if isinstance(policy.ratio, tuple) else (policy.ratio,) * len(policy.check_layers)
    left = dict(zip(policy.check_layers, ratios, strict=True))
    rows, x, found = torch.arange(prompt.tokens), model.embedding[prompt.ids], []
    for index in range(LAYERS):
        q, k, v = model.project(index, x)
        all_k, all_v = prompt.stored_kv(index)
        if index in left:
            stored = (all_k if policy.deviation == "k" else all_v)[rows]
            deviation = ((k if policy.deviation == "k" else v) - stored).square().sum((1, 2))
            deviation[~prompt.reused[rows]] = -1
            keep = ~prompt.stored[rows]
            keep[deviation.topk(round(left[index] * int(prompt.reused.sum()))).indices] = True
        all_k[rows], all_v[rows] = k, v
        found.append((all_k, all_v))
        if index in left:
            rows, x, q = rows[keep], x[keep], q[keep]
        x = model.add(index, x, attention(q, all_k, all_v, torch.arange(prompt.tokens)[None] <= rows[:, None]))
    return found


def assert_same(found: KV, expected: KV, atol: float = 1e-9) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=atol, rtol=0, msg=lambda text, at=index: f"layer {at}: {text}")


# Gradual filtering.


@pytest.mark.parametrize("kept", [4 * 2**30, 40_000, 0], ids=["all layers kept", "some", "none"])
@pytest.mark.parametrize("max_rows", [10_000, 17])
@pytest.mark.parametrize("policy", [
    CacheBlend(0.3, (1,)), CacheBlend(0.3, (3,), "v"), CacheBlend((0.6, 0.3), (1, 3)), CacheBlend((0.6, 0.3), (2, 4)),
    CacheBlend((0.7, 0.4, 0.1), (1, 2, 4), "v"), CacheBlend((1.0, 0.2), (1, 2)), CacheBlend(0.4, (1, 5)),
], ids=str)
def test_what_is_written_is_what_one_pass_of_gradual_filtering_makes(monkeypatch, policy, max_rows, kept):
    monkeypatch.setattr(blender_module, "_KEEP_BYTES", kept)
    model = Model(max_rows)
    prompt = Prompt(model)
    [found], [report] = blend(model, [prompt], [policy])
    assert_same(found, gradual_filtering(model, prompt, policy))
    last = policy.ratio[-1] if isinstance(policy.ratio, tuple) else policy.ratio
    assert report.recomputed == round(last * int(prompt.reused.sum()))


def test_a_first_check_that_keeps_all_is_none():
    model = Model()
    prompt = Prompt(model)
    [twice], _ = blend(model, [prompt], [CacheBlend((1.0, 0.2), (1, 2))])
    [once], _ = blend(model, [prompt], [CacheBlend(0.2, (2,))])
    assert_same(twice, once)


def test_requests_of_different_policies_are_blended_together_as_one_by_one():
    policies = [CacheBlend((0.5, 0.2), (1, 3)), CacheBlend(0.3, (1,)), Query(reach=0), CacheBlend((0.4, 0.2), (1, 3)),
                First(4), NoRecompute(), Full()]
    model = Model(50)
    prompts = [Prompt(model, seed=seed) for seed in range(len(policies))]
    together, _ = blend(model, prompts, policies)
    for found, prompt, policy in zip(together, prompts, policies, strict=True):
        [alone], _ = blend(model, [prompt], [policy])
        assert_same(found, alone)
    assert_same(together[0], gradual_filtering(model, prompts[0], policies[0]))
    assert_same(together[-1], prefill(model, prompts[-1].ids))


@pytest.mark.parametrize("kept", [4 * 2**30, 0], ids=["all layers kept", "none"])
def test_what_is_asked_within_a_chunk_leaves_the_stored_kv_alone(monkeypatch, kept):
    """Where a prompt ends soon after its last chunk, that chunk's end is taken for the question."""
    model = Model()
    prompt = Prompt(model)
    prompt.question_start = prompt.placements[-1].end - 8
    monkeypatch.setattr(blender_module, "_KEEP_BYTES", 0)
    [expected], _ = blend(model, [prompt], [Query(0.2)])
    monkeypatch.setattr(blender_module, "_KEEP_BYTES", kept)
    [found], _ = blend(model, [prompt], [Query(0.2)])
    assert_same(found, expected)


def test_more_scoring_passes_than_layers_are_refused():
    """Each is a pass that all other requests would wait for."""
    model = Model()
    prompt = Prompt(model)
    policy = CacheBlend(0.3, tuple(range(LAYERS + 1)))
    source: Any = SimpleNamespace(fingerprint="", ranks=Ranks(), tier=None,
                                  ready=lambda needs, _: [True] * len(needs), release=lambda request_id: None,
                                  load=lambda keys, _: [prompt.entries[key] for key in keys])
    runs: Any = model
    queue = PassQueue(Blender(runs, runs, source))
    queue.add([prompt.job(policy)])
    [report] = queue.advance(10**9).values()
    assert "asks for 7 scoring passes of a model that has 6 layers: name fewer check layers" in report.failure


class LateTier(DeviceTier):
    """Copies arrive only where they are waited for."""

    def wait(self, layer):
        for source, copy in self._waiting.values():
            copy.k[layer], copy.v[layer] = source.k[layer], source.v[layer]


def test_entries_that_the_gather_kernel_cannot_read_are_waited_for_too():
    model = Model()
    prompt = Prompt(model)
    tier = LateTier(model.device, budget=10**9)
    entries = {key: KVEntry(entry.k.float(), entry.v.float()) for key, entry in prompt.entries.items()}
    placed = tier.hold(entries)
    context = Context(model, prompt.tokens, [(p, placed[p.key]) for p in prompt.placements], tier=tier)
    for index in range(LAYERS):
        for found, expected in zip(context.layer(index), prompt.stored_kv(index), strict=True):
            torch.testing.assert_close(found[prompt.stored], expected[prompt.stored], atol=1e-6, rtol=0)


def test_the_rows_of_each_step_are_counted():
    model = Model()
    prompt = Prompt(model)
    _, [report] = blend(model, [prompt], [CacheBlend((0.5, 0.2), (1, 3))])
    new, reused = int((~prompt.stored).sum()), int(prompt.reused.sum())
    assert report.row_layers == 2 * prompt.tokens + 4 * (new + round(0.5 * reused)) + LAYERS * (
        new + round(0.2 * reused))


def test_ranks_meet_over_the_scores_and_the_choice_of_every_step():
    ranks = Ranks()
    model = Model()
    blend(model, [Prompt(model)], [CacheBlend((0.5, 0.2), (1, 3))], ranks=ranks)
    assert (ranks.totals, ranks.firsts) == (2, 2)


class Greedy(CacheBlend):
    """Wants everything at the second step."""

    def select(self, layout, scores, step=0):
        assert bool(scores.isneginf().any()) == (step > 0 or not layout.reused.all())
        return super().select(layout, scores, step) if step == 0 else layout.reused.clone()


def test_a_step_gets_no_token_back_that_the_one_before_it_left():
    policy = Greedy((0.5, 0.2), (1, 3))
    model = Model()
    prompt = Prompt(model)
    _, [report] = blend(model, [prompt], [policy])
    assert report.recomputed == round(0.5 * int(prompt.reused.sum()))


# Sparse attention.


def sparse_reference(model: Model, prompt: Prompt, policy: CacheBlend, budget: int) -> KV:
    """One pass, in which the rows that are left after the check layer see only what they may."""
    [check], block = policy.check_layers, 64
    rows, x, found = torch.arange(prompt.tokens), model.embedding[prompt.ids], []
    seen = torch.arange(prompt.tokens)[None] <= rows[:, None]
    for index in range(LAYERS):
        q, k, v = model.project(index, x)
        all_k, all_v = prompt.stored_kv(index)
        if index == check:
            deviation = (k - all_k).square().sum((1, 2)) * prompt.stored
            count = round(policy.ratio * int(prompt.reused.sum()))
            keep = ~prompt.stored
            keep[deviation.masked_fill(~prompt.reused, -1).topk(count).indices] = True
            number = torch.arange(prompt.tokens) // block
            first = -(-min(p.start for p in prompt.placements if not p.exact) // block)
            sums = [(-float(deviation[number == b].sum()), b) for b in range(first, int(number[-1]) + 1)]
            chosen = {b for _, b in sorted(sums)[: budget // block]} | set(range(first)) | {0}
            for placement in (p for p in prompt.placements if not p.exact):
                own = set(range(placement.start // block, -(-placement.end // block)))
                for row in range(placement.start, placement.end):
                    for b in set(number.tolist()) - chosen - own - {row // block - 1, row // block}:
                        seen[row, number == b] = False
        all_k[rows], all_v[rows] = k, v
        found.append((all_k, all_v))
        if index == check:
            rows, x, q, seen = rows[keep], x[keep], q[keep], seen[keep]
        x = model.add(index, x, attention(q, all_k, all_v, seen))
    return found


@pytest.mark.parametrize("max_rows", [10_000, 100])
@pytest.mark.parametrize("prefix", [0, 10, 130])
@pytest.mark.parametrize("budget", [0, 64, 200])
def test_sparse_rows_see_the_prefix_their_chunk_recent_tokens_and_the_best_blocks(budget, prefix, max_rows):
    model = Model(max_rows)
    prompt = Prompt(model, (150, 90, 200, 140), prefix)
    policy = CacheBlend(0.2, (1,))
    [found], _ = blend(model, [prompt], [policy], budget)
    assert_same(found, sparse_reference(model, prompt, policy, budget))
    [dense], _ = blend(model, [prompt], [policy])
    assert max((a[1] - b[1]).abs().max() for a, b in zip(found, dense, strict=True)) > 1e-4


@pytest.mark.parametrize("policy", [Query(0.2), CacheBlend((0.5, 0.2), (1, 3))], ids=str)
def test_a_budget_of_the_whole_prompt_is_dense_attention(policy):
    model = Model()
    prompt = Prompt(model, (150, 90))
    [dense], _ = blend(model, [prompt], [policy])
    [found], _ = blend(model, [prompt], [policy], prompt.tokens)
    assert_same(found, dense, atol=0)
    [nearly], _ = blend(model, [prompt], [policy], prompt.tokens - 1)
    assert_same(nearly, dense)  # all blocks but a part of one that all rows see anyway


@pytest.mark.parametrize("policy", [Full(), NoRecompute(), First(20)], ids=str)
def test_policies_that_measure_nothing_stay_dense(policy):
    model = Model()
    prompt = Prompt(model, (150, 90))
    [dense], _ = blend(model, [prompt], [policy])
    [found], _ = blend(model, [prompt], [policy], 0)
    assert_same(found, dense, atol=0)
