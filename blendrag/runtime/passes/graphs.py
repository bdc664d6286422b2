"""vLLM's piecewise CUDA graphs of the model, replayed by passes.

Between two attention layers vLLM launches one captured graph in place of some dozen kernels.  A graph reads token ids
and positions from the buffers that it was captured with, and has a fixed number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

_PASS_SIZES = (*range(32, 512, 32), *range(512, 1025, 64))
"""Rows of passes.  vLLM captures graphs of what requests that decode may need, and stops at 512."""


@dataclass(frozen=True)
class Graph:
    """The graphs of one number of rows.

    Attributes:
        descriptor: vLLM's `BatchDescriptor`, by which its wrappers choose the graphs.
        ids, positions: buffers [rows] that they read; vLLM's model runner fills them for its own steps.
    """

    descriptor: Any
    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.ids)

    @contextmanager
    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> Iterator[None]:
        """Within it the buffers hold these rows, padded; then again what they held, which vLLM may yet compute."""
        before = self.ids.clone(), self.positions.clone()
        for buffer, values in ((self.ids, ids), (self.positions, positions)):
            buffer[: len(values)] = values
            buffer[len(values) :] = 0
        try:
            yield
        finally:
            self.ids.copy_(before[0])
            self.positions.copy_(before[1])


class Graphs:
    """The graphs that vLLM has captured, by their number of rows; none on the CPU, or of eager engines."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []

    def smallest(self, rows: int) -> Graph | None:
        """The graph that takes so many rows with the least padding; None where all are too small."""
        at = bisect_left(self._graphs, rows, key=lambda graph: graph.rows)
        return self._graphs[at] if at < len(self._graphs) else None

    @contextmanager
    def recording(self, model: torch.nn.Module) -> Iterator[None]:
        """Within it vLLM captures the model's graphs."""
        captured: dict[int, Graph] = {}

        def note(_module: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
            graph = None if args else _captured(inputs)
            if graph is not None:
                captured[graph.rows] = graph

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
        self._graphs = [captured[rows] for rows in sorted(captured)]


def capture_for_passes(vllm_config: Any) -> None:
    """Has vLLM capture graphs of the sizes of passes as well, unless the user chose the sizes."""
    compilation = vllm_config.compilation_config
    sizes, most = compilation.cudagraph_capture_sizes, vllm_config.scheduler_config.max_num_batched_tokens
    if not sizes or not compilation.cudagraph_mode.has_piecewise_cudagraphs() or sizes != _vllm_sizes(sizes):
        return
    more = [size for size in _PASS_SIZES if sizes[-1] < size <= most]
    if more:
        compilation.cudagraph_capture_sizes = [*sizes, *more]
        compilation.max_cudagraph_capture_size = more[-1]


def _vllm_sizes(sizes: list[int]) -> list[int]:
    """What vLLM chooses by itself where it stops at the same size."""
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, sizes[-1] + 1, 16)) if size <= sizes[-1]]


def _captured(inputs: dict[str, Any]) -> Graph | None:
    """The graphs that are captured, or replayed, by a call of the model with these inputs; None where none are."""
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    ids, positions = inputs.get("input_ids"), inputs.get("positions")
    if (context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE or context.batch_descriptor is None
            or not isinstance(ids, torch.Tensor) or not isinstance(positions, torch.Tensor) or positions.dim() != 1
            or any(inputs[name] is not None for name in inputs.keys() - {"input_ids", "positions"})):
        return None
    return Graph(context.batch_descriptor, ids, positions)
