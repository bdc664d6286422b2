"""Which of vLLM's CUDA graphs a pass replays, and what it leaves in their input buffers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from blendrag.runtime.passes.graphs import Graph, Graphs, capture_for_passes

IDS, POSITIONS = torch.arange(64), torch.arange(64) + 1000


class Model(torch.nn.Module):
    def forward(self, **inputs: Any) -> None:
        """Nothing to compute."""


def run(model: Model, rows: int, mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE, **inputs: Any) -> None:
    """A step of vLLM's model runner over so many rows of its buffers."""
    context: Any = SimpleNamespace(cudagraph_runtime_mode=mode, batch_descriptor=f"{rows} rows")
    with override_forward_context(context):
        model(**{"input_ids": IDS[:rows], "positions": POSITIONS[:rows], "intermediate_tensors": None,
                 "inputs_embeds": None} | inputs)


def captured(*sizes: int) -> Graphs:
    graphs, model = Graphs(), Model()
    with graphs.recording(model):
        for size in sizes:
            run(model, size)
    return graphs


@pytest.mark.parametrize(("rows", "expected"), [(1, 8), (8, 8), (9, 16), (17, 64), (64, 64), (65, None)])
def test_the_smallest_graph_that_is_large_enough(rows: int, expected: int | None) -> None:
    graph = captured(64, 8, 16).smallest(rows)
    assert (graph and graph.rows) == expected
    assert graph is None or graph.descriptor == f"{expected} rows"


def test_of_an_engine_without_graphs_there_is_none() -> None:
    assert captured().smallest(1) is None


@pytest.mark.parametrize("other", [
    {"mode": CUDAGraphMode.NONE}, {"mode": CUDAGraphMode.FULL},  # warming up; graphs of attention, too
    {"positions": torch.zeros(3, 16)}, {"input_ids": None, "inputs_embeds": torch.zeros(16, 4)},
    {"deepstack": torch.zeros(16, 4)}])
def test_graphs_with_other_inputs_are_not_replayed(other: Any) -> None:
    graphs, model = Graphs(), Model()
    with graphs.recording(model):
        run(model, 8)
        run(model, 16, **other)
    assert graphs.smallest(9) is None
    run(model, 32)
    assert graphs.smallest(9) is None, "what runs afterwards was not captured"


@pytest.mark.parametrize("ends", [nullcontext(), pytest.raises(KeyError)])
def test_the_buffers_hold_a_passes_rows_and_then_what_vllm_put_there(ends: Any) -> None:
    ids, positions = torch.arange(8), torch.arange(8) + 100
    graph = Graph("8 rows", ids, positions)
    with ends as error, graph.inputs(torch.tensor([7, 7, 7]), torch.tensor([4, 5, 6])):
        assert ids.tolist() == [7, 7, 7, 0, 0, 0, 0, 0]
        assert positions.tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
        if error is not None:
            raise KeyError
    assert ids.tolist() == list(range(8))
    assert positions.tolist() == list(range(100, 108))


def config(sizes: list[int] | None, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, tokens: int = 2048) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, cudagraph_mode=mode,
                                           max_cudagraph_capture_size=sizes[-1] if sizes else 0),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens))


def test_graphs_of_passes_are_captured_beside_those_that_vllm_chose() -> None:
    usual = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    chosen = config(list(usual))
    capture_for_passes(chosen)
    sizes = chosen.compilation_config.cudagraph_capture_sizes
    assert sizes[: len(usual)] == usual
    assert sizes[len(usual) :] == list(range(576, 1025, 64))
    assert chosen.compilation_config.max_cudagraph_capture_size == 1024


def test_for_few_requests_vllm_chooses_few_and_passes_get_theirs() -> None:
    chosen = config([1, 2, 4, 8], tokens=100)
    capture_for_passes(chosen)
    assert chosen.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8, 32, 64, 96]


@pytest.mark.parametrize("chosen", [
    config([1, 2, 3]), config([]), config(None, CUDAGraphMode.NONE),
    config([1, 2, 4, 8], CUDAGraphMode.FULL_DECODE_ONLY)])
def test_what_a_user_chose_stays(chosen: Any) -> None:
    before = chosen.compilation_config.cudagraph_capture_sizes
    capture_for_passes(chosen)
    assert chosen.compilation_config.cudagraph_capture_sizes is before
