"""An audit's distributions are those of the blend pass and of a full prefill, each followed by the last token."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendrag.policies import CacheBlend, Exact, First, NoRecompute, Policy, Query
from blendrag.runtime.messages import Audit, AuditResult, BlendReports
from blendrag.runtime.passes.auditor import Auditor, divergence
from blendrag.runtime.passes.blender import Blender
from tests.test_blender import KV, LAYERS, VOCABULARY, WIDTH, Model, Prompt, Ranks, attention, blend, prefill

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES: list[Policy] = [NoRecompute(), First(tokens=3), Query(ratio=0.3), Query(ratio=0.3, reach=0),
                          Query(ratio=0.3, layers=(0.3, 1.0), over_rows="mean"),
                          CacheBlend((0.6, 0.3), (1, 3))]
LAST = torch.tensor([7])


class WholeModel(Model):
    """A model whose passes may go on to the end, with logits."""

    def __init__(self, max_rows: int = 10_000) -> None:
        super().__init__(max_rows)
        self.head = torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.ran = 0

    def end(self, lane: Any, part: Any, x: torch.Tensor) -> None:
        if part.last:
            lane.finish(x[-1:])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.head)[0]

    def after(self, kv: KV) -> torch.Tensor:
        """Logits of the last token behind some KV."""
        x = self.embedding[LAST]
        for index in range(LAYERS):
            q, k, v = self.project(index, x)
            all_k, all_v = torch.cat([kv[index][0], k]), torch.cat([kv[index][1], v])
            x = self.add(index, x, attention(q, all_k, all_v, torch.ones(1, len(all_k), dtype=torch.bool)))
        return self.logits(x)


def audit(model: WholeModel, prompt: Prompt, policies: list[Policy], sparse: int | None = None,
          fingerprint: str = "model") -> AuditResult:
    runs: Any = model
    source: Any = SimpleNamespace(ranks=Ranks(), tier=None, fingerprint=fingerprint,
                                  load=lambda keys, _: [prompt.entries.get(key) for key in keys])
    asked = Audit(policies[0], policies, torch.cat([prompt.ids, LAST]).numpy(), prompt.placements,
                  prompt.question_start, fingerprint="model")
    [result] = Auditor(Blender(runs, runs, source, sparse)).advance([asked], rows=10**9)
    return result


@pytest.mark.parametrize("max_rows", [10_000, 17, 1])
@pytest.mark.parametrize("sparse", [None, 10])
def test_it_is_what_the_request_got_and_would_have_got(max_rows: int, sparse: int | None) -> None:
    model = WholeModel(max_rows)
    prompt = Prompt(model)
    full = model.after(prefill(model, prompt.ids))
    expected = [divergence(full, model.after(blend(model, [prompt], [policy], sparse)[0][0])) for policy in POLICIES]
    for layer in model.layers:
        layer.impl.written.clear()
    result = audit(model, prompt, POLICIES, sparse)
    assert result.failure == ""
    assert result.kl == pytest.approx([kl for kl, _ in expected], rel=1e-6)
    assert result.same == [same for _, same in expected]
    assert min(result.kl) > 0
    assert not any(layer.impl.written for layer in model.layers)


def test_nothing_approximate_is_no_divergence() -> None:
    model = WholeModel()
    prompt = Prompt(model)
    prompt.pieces = [piece for piece in prompt.pieces if piece[0].exact]
    assert audit(model, prompt, [Exact()]).kl == pytest.approx([0], abs=1e-9)


def test_an_entry_that_is_gone_means_no_result() -> None:
    prompt = Prompt(model := WholeModel())
    del prompt.entries[prompt.placements[1].key]
    assert audit(model, prompt, [Query()]) == AuditResult()


def test_a_request_that_other_weights_answered_is_not_audited() -> None:
    prompt = Prompt(model := WholeModel())
    assert audit(model, prompt, [Query()], fingerprint="other") == AuditResult()


def test_a_failure_is_told() -> None:
    prompt = Prompt(model := WholeModel())
    model.logits = None  # type: ignore[assignment]
    assert audit(model, prompt, [Query()]).failure.startswith("TypeError: ")


def test_divergence_of_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25, 0]).double(), torch.tensor([0.25, 0.25, 0.5, 0]).double()
    assert divergence(p.log(), q.log()) == (pytest.approx(0.25 * 0.6931472), False)
    assert divergence(p.log() + 3, p.log()) == (pytest.approx(0, abs=1e-12), True)
    assert divergence(p.log(), torch.tensor([1.0, 0, 0, 0]).double().log())[0] == float("inf")


def test_what_is_not_a_number_is_no_good_answer() -> None:
    good, broken = torch.randn(8).double(), torch.randn(8).double()
    broken[3] = float("nan")
    assert math.isnan(divergence(good, broken)[0]), "which counts as the worst"
    with pytest.raises(ArithmeticError, match="not numbers"):
        divergence(broken, good)


def test_ranks_without_logits_add_nothing_and_a_failure_of_one_counts() -> None:
    first = BlendReports(audits=[AuditResult([0.5], [True]), AuditResult(), AuditResult([0.1], [True])])
    second = BlendReports(audits=[AuditResult(), AuditResult(), AuditResult(failure="no memory")])
    assert first.aggregate(second).audits == [AuditResult([0.5], [True]), AuditResult(),
                                              AuditResult(failure="no memory")]
