"""The engine in a script of its own: no `__main__` guard, and memory that is free again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import json
import psutil
from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams

def resident():
    return psutil.Process().memory_info().rss

text = "The lighthouse at Skerry Point was built in 1847 by Alan Marsh, who learned his trade on the Bell Rock. " * 3
found = []
for number in range(2):
    engine = BlendEngine({model!r}, config=BlendConfig(store_path={store!r}), dtype="float32", enforce_eager=True,
                         max_model_len=1024, kv_cache_memory_bytes=2**30)
    constructed = resident()
    new = engine.encode([text])[0].new
    [output] = engine.generate(BlendPrompt("Read: ", Chunk(text), " Who built it?"), SamplingParams(max_tokens=4))
    # Touch all of the paged cache, so that it counts as resident.
    engine._start().call(lambda vllm: vllm.collective_rpc(lambda worker: [
        layer.attention.kv_cache.zero_().numel() for layer in worker._blender.model.layers]))
    running = resident()
    engine.close()
    found.append(dict(constructed=constructed, running=running, closed=resident(), new=new,
                      reused=output.stats.chunks_reused))
print(json.dumps(found))
"""


def test_a_script_without_a_main_guard(own_process: Callable[[str], str], smollm2: Path, tmp_path: Path) -> None:
    printed = own_process(SCRIPT.format(model=str(smollm2), store=str(tmp_path / "store")))
    first, second = json.loads(printed.splitlines()[-1])
    assert (first["reused"], second["reused"]) == (1, 1)
    assert (first["new"], second["new"]) == (True, False), "the second engine finds what the first one stored"
    for engine in (first, second):
        held = 2**30 + 500 * 2**20  # the paged cache and the weights
        assert engine["running"] - engine["closed"] > 0.9 * held
    assert second["closed"] - first["closed"] < 150 * 2**20
