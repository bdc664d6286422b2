"""Two tensor-parallel ranks on the CPU pick the same rows and give one rank's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.families import FAMILIES, build

# vLLM wants a NUMA node for each rank unless it is told which cores to use; `__main__` because ranks are processes.
SCRIPT = """
import json
import sys

import torch

from blendrag import BlendConfig, BlendEngine, SamplingParams
from tests.engine.texts import PASSAGES, SYSTEM, layouts

FIRST = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)


def main(model):
    told = []
    for ranks in (1, 2):
        with BlendEngine(model, config=BlendConfig(populate="on_miss"), dtype="float32", enforce_eager=True,
                         max_model_len=1024, max_logprobs=-1, kv_cache_memory_bytes=2**26,
                         tensor_parallel_size=ranks) as engine:
            engine.encode(PASSAGES[:4])
            engine.encode(PASSAGES[:3], prefix=SYSTEM)
            found = {}
            for policy in ("plain", "full", "query", "cacheblend"):
                how = {"blend": False} if policy == "plain" else {"policy": policy}
                outputs = engine.generate(layouts()[:7], FIRST, **how)
                found[policy] = [
                    ([output.outputs[0].logprobs[0][token].logprob for token in range(600)], output.stats.to_dict())
                    for output in outputs]
            engine.flush()
            found["stored"] = engine.stored(PASSAGES)
            [engine.store.delete(key) for key in engine.store.keys()[:2]]
            found["after"] = [output.stats.failure for output in engine.generate(layouts()[:7], FIRST, policy="none")]
            told.append(found)
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, engine_pool: Any) -> list[dict[str, Any]]:
    """What an engine of one rank and one of two ranks answer."""
    engine_pool.close()
    folder = tmp_path_factory.mktemp("ranks")
    build(next(family for family in FAMILIES if family.name == "Llama"), folder / "model")
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, str(folder / "script.py"), str(folder / "model")], check=False,
                          capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["plain", "full", "query", "cacheblend"])
def test_two_ranks_answer_as_one(told: list[dict[str, Any]], policy: str) -> None:
    one, two = (found[policy] for found in told)
    for (alone, stats_alone), (together, stats_together) in zip(one, two, strict=True):
        assert together == pytest.approx(alone, abs=1e-3)
        counts = ("reused_tokens", "recomputed_tokens", "rows", "chunks_reused", "failure")
        assert [stats_alone[name] for name in counts] == [stats_together[name] for name in counts]


def test_all_rows_are_a_full_prefill_on_two_ranks(told: list[dict[str, Any]]) -> None:
    for (ours, _), (theirs, _) in zip(told[1]["full"], told[1]["plain"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_ranks_store_what_requests_bring_and_agree_on_what_is_gone(told: list[dict[str, Any]]) -> None:
    assert told[1]["stored"] == told[0]["stored"] == [True] * 6
    assert told[1]["after"] == [""] * 7
