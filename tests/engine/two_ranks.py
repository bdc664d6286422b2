"""Compares an engine of two tensor-parallel ranks with one of one rank: `python -m tests.engine.two_ranks`.

Runs on two GPUs of one host, or on two CPU cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from blendrag import BlendConfig, BlendEngine, SamplingParams
from blendrag.errors import StoreError
from tests.engine.families import build, named
from tests.engine.texts import PASSAGES, SYSTEM, layouts

FIRST = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
CORES = ("VLLM_CPU_OMP_THREADS_BIND", "0|1")
"""A variable: unasked, vLLM wants a NUMA node for each rank."""
BROKEN = ("present", "get", "put_all", "delete")
POLICIES = ("plain", "full", "none", "query", "cacheblend")


def ask(model: Path, ranks: int) -> dict[str, Any]:
    """First-token log-probabilities and statistics of some prompts by policy, and what is stored afterwards."""
    engine_args: dict[str, Any] = {}
    if torch.cuda.is_available():  # of GPUs that may have other work, too
        engine_args = {"disable_custom_all_reduce": True, "gpu_memory_utilization": 0.1}
    config = BlendConfig(populate="on_miss", quality_guard={"share": 1.0, "max_kl": 100.0})
    with BlendEngine(str(model), config=config, dtype="float32", enforce_eager=True,
                     max_model_len=1024, max_logprobs=-1, kv_cache_memory_bytes=2**26, tensor_parallel_size=ranks,
                     **engine_args) as engine:
        engine.encode(PASSAGES[:4])
        engine.encode(PASSAGES[:3], prefix=SYSTEM)
        found: dict[str, Any] = {}
        for policy in POLICIES:
            how: dict[str, Any] = {"blend": False} if policy == "plain" else {"policy": policy}
            found[policy] = [(first_token(output), output.stats.to_dict())
                             for output in engine.generate(layouts()[:7], FIRST, **how)]
            engine.flush()  # what is stored must not depend on how fast the ranks are
            engine.reset_prefix_cache()  # what is cached and exact would be preferred
        found["quality"] = {of.policy: (of.audited, of.kl, of.top1) for of in engine.quality()}
        found["stored"] = engine.stored(PASSAGES)
        for key in engine.store.keys()[:2]:
            engine.store.delete(key)
        found["after"] = [output.stats.failure for output in engine.generate(layouts()[:7], FIRST, policy="none")]
        engine.flush()
        found["broken"] = [broken(engine, method, rank) for method in BROKEN for rank in range(ranks)]
        engine.encode(PASSAGES)
        before = len(engine.store.keys())
        forgotten = engine.forget(PASSAGES)
        found["forgotten"] = [forgotten, any(engine.stored(PASSAGES)), (before - len(engine.store.keys())) / ranks]
        found["renamed"] = renamed(engine)
        return found


def fail_once(worker: Any, method: str, rank: int) -> None:
    """Makes the next call of a store's method fail on one rank; runs in the worker."""
    entries = worker._encoder.entries
    if entries.ranks.rank != rank:
        return

    def fail(*_: Any, **__: Any) -> None:
        delattr(entries._store, method)
        raise StoreError("the disk is gone: look for it")

    setattr(entries._store, method, fail)


def broken(engine: BlendEngine, method: str, rank: int) -> tuple[str, str]:
    """What the next use of the store ends with, and the error of requests and uses after that."""
    engine.encode(PASSAGES[:1])
    engine._start().call(lambda inner: inner.collective_rpc(fail_once, args=(method, rank)))
    ended = ""
    try:
        if method == "get":
            engine.generate(layouts()[0], FIRST, policy="none")
        elif method == "delete":
            engine.forget(PASSAGES[:1])
        elif method == "put_all":
            engine.encode([f"Only rank {rank} cannot store this passage. " * 5])
        else:
            engine.stored(PASSAGES[:1])
    except StoreError as error:
        ended = str(error)
    engine.encode(PASSAGES[:1])
    [output] = engine.generate(layouts()[0], FIRST, policy="none")
    return ended, output.stats.failure + ("" if engine.stored(PASSAGES[:1]) == [True] else "not stored")


def renamed(engine: BlendEngine) -> dict[str, Any]:
    """Why a chunk was not reused after the caches were reset, then after the weights were loaded again, and so on."""
    loop, prompt = engine._start(), layouts()[16]

    def ask() -> tuple[str, str]:
        loop.call(lambda vllm: vllm.reset_prefix_cache())
        [output] = engine.generate(prompt, FIRST, policy="none")
        engine.flush()  # no step is left to do, so none comes between a change and the next request
        return output.stats.chunks[0].reason, output.stats.failure

    found: dict[str, Any] = {}
    for change, make in (("reset", lambda vllm: vllm.reset_prefix_cache(reset_connector=True)),
                         ("reload", lambda vllm: vllm.collective_rpc("reload_weights"))):
        engine.encode(PASSAGES[2:3])
        before = ask()
        loop.call(make)
        found[change] = [before, ask(), ask(), ask()]
    return found


def first_token(output: Any) -> list[float]:
    """Log-probabilities over the vocabulary."""
    chances = output.outputs[0].logprobs[0]
    return [chances[token].logprob for token in sorted(chances)]


def furthest(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference of a log-probability."""
    return max(abs(a - b) for (x, _), (y, _) in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


def table(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """The comparison, for people."""
    lines = ["largest difference of a first-token log-probability; share of rows computed"]
    for policy in POLICIES:
        rows = [sum(stats["rows"] for _, stats in found[policy]) / len(found[policy]) for found in (one, two)]
        lines.append(f"{policy:10}  two ranks and one {furthest(two[policy], one[policy]):.1e}  two ranks and plain "
                     f"{furthest(two[policy], two['plain']):.1e}  rows {rows[0]:.3f} {rows[1]:.3f}")
    return lines


def compare(folder: Path) -> list[dict[str, Any]]:
    """What an engine of one rank finds, and one of two; the model is written to a folder."""
    model = build(named("Llama"), folder)
    return [ask(model, ranks) for ranks in (1, 2)]


def main() -> None:
    os.environ.setdefault(*CORES)
    with tempfile.TemporaryDirectory() as folder:
        one, two = compare(Path(folder, "model"))
    sys.stdout.write("\n".join(table(one, two)) + "\n")


if __name__ == "__main__":
    main()
