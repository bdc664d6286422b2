"""Several check layers and sparse attention, on a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag import BlendConfig
from tests.engine.conformance import answers, assert_same, distribution, family_engine
from tests.engine.families import build, named
from tests.engine.test_reuse import fresh
from tests.engine.texts import PASSAGES, short_layouts


def test_gradual_filtering_and_sparse_attention(engine_pool: Any, tmp_path: Path) -> None:
    family = named("Llama, llama3 rope")
    family = replace(family, settings=family.settings | {"num_hidden_layers": 5})
    engine = family_engine(lambda model, **arguments: engine_pool.get(
        model, config=BlendConfig(sparse_attention=64), **arguments), family, build(family, tmp_path / "selection"))
    engine.encode(PASSAGES)

    def run(**how: Any) -> Any:
        return answers(engine, short_layouts(), 4, cache_salt=fresh(), **how)

    plain = run(blend=False)
    assert_same(run(policy="full"), plain)  # it measures nothing, so it stays dense
    once = run(policy="cacheblend", ratio=0.2, check_layers=[2])
    assert_same(run(policy="cacheblend", ratio=[1.0, 0.2], check_layers=[1, 2]), once)
    gradual = run(policy="cacheblend", ratio=[0.6, 0.2], check_layers=[1, 2])
    assert [o.stats.recomputed_tokens for o in gradual] == [o.stats.recomputed_tokens for o in once]
    sparse = run(policy="query", ratio=1.0)  # all rows are computed: only what they do not see makes a difference
    assert any((distribution(a) - distribution(b)).abs().max() > 1e-3 for a, b in zip(sparse, plain, strict=True))
    assert engine.stats.failures == 0
