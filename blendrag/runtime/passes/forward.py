"""Runs the model vLLM loaded over chosen rows, with its attention swapped for ours.

A pass is `model(input_ids[rows], positions[rows])`: every layer but attention is position-wise, so
it does not matter which tokens the rows are.  While the pass runs, each attention layer's `impl` is
a stand-in that hands the rows' fresh queries, keys and values to the lanes they belong to.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import set_forward_context

from blendrag.runtime.model.blend_model import BlendModel, Layer
from blendrag.runtime.model.lora import without_adapters
from blendrag.runtime.passes.graphs import Graphs


@dataclass(frozen=True)
class Part:
    """The rows of a lane that run in one forward; a lane with more rows than a forward takes has several."""

    rows: slice
    last: bool


class Lane(ABC):
    """The rows of one prompt or chunk in a pass.

    Attributes:
        ids: int64 [rows], the rows' tokens.
        positions: int64 [rows], ascending, the rows' positions.
        context_tokens: length of the context that the rows attend to.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    context_tokens: int = 0

    @abstractmethod
    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        """Takes the rows' fresh q, k, v ([rows, heads, head size], rotated) in layer `index`.

        Returns:
            The attention output, shaped like q; None where the pass needs to go no further.
        """

    def finish(self, hidden: torch.Tensor) -> None:  # noqa: B027  (few lanes want it)
        """Takes what the model makes of the last row, [1, hidden size]; not called where the pass stopped early."""


Tile = Sequence[tuple[Lane, Part]]
"""What runs in one forward; a lane's parts run in order."""

T = TypeVar("T")
Passes = Generator[Tile, float, T]
"""Yields forwards to run, one after the other, and takes the seconds that each took; returns what came of them."""


class _Stop(Exception):  # noqa: N818  (control flow, not an error)
    """Ends a pass from within the model."""


class _SwappedImpl:
    """Stands in for an attention layer's `impl`; everything but the forward is still the original's."""

    def __init__(self, forward: Forward, index: int, layer: Layer) -> None:
        self._forward, self._index, self._layer = forward, index, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer.impl, name)

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Lanes write the paged cache themselves, whole contexts at a time."""

    def forward(self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: Any, metadata: Any,
                output: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._forward.attend(self._index, self._layer, q, k, v, output)
        return output


class Forward:
    """Runs passes over lanes; one at a time.

    Args:
        eager: never use vLLM's compiled code, not even where there is some.
        graphs: vLLM's CUDA graphs of the model.

    Attributes:
        max_rows: rows that a forward takes.
        pass_rows: rows of a request's passes that one forward takes.  On a GPU three quarters, so that a step with
            one and with requests that decode takes no longer than one with a chunk of vLLM's own prefill.
    """

    def __init__(self, model: BlendModel, *, eager: bool = False, graphs: Graphs | None = None) -> None:
        self.model = model
        self.max_rows: int = model.vllm_config.scheduler_config.max_num_batched_tokens
        self.pass_rows = self.max_rows if model.device.type == "cpu" else max(1, self.max_rows * 3 // 4)
        # A multimodal model is compiled for embeddings and three-dimensional positions; text rows have neither.
        self._compiled = not (eager or model.vllm_config.model_config.is_multimodal_model
                              or model.vllm_config.compilation_config.mode == CompilationMode.NONE)
        # The scales of quantised activations may be of all rows together, the padding's too.
        self._clears_padding = model.vllm_config.model_config.quantization is not None
        self._graphs = graphs if self._compiled and not model.vllm_config.lora_config else None
        self._impls = [_SwappedImpl(self, index, layer) for index, layer in enumerate(model.layers)]
        self._running: list[tuple[Lane, Part, slice]] = []

    def run(self, lanes: Sequence[Lane]) -> None:
        """Takes all rows of all lanes through the model, in as few forwards as `max_num_batched_tokens` allows."""
        for tile in tiles(lanes, self.max_rows):
            self.run_tile(tile)

    def passes(self, lane: Lane) -> Passes[float]:
        """The forwards of one lane, about equally long; returns the seconds that they took."""
        seconds, rows = 0.0, len(lane.positions)
        forwards = max(1, -(-rows // self.pass_rows))
        for tile in tiles([lane], -(-rows // forwards)):
            seconds += yield tile
        return seconds

    def timed_tile(self, tile: Tile) -> float:
        """Runs a tile to its end; returns the seconds that it took."""
        started = time.perf_counter()
        self.run_tile(tile)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The model's logits of one row, float64 [vocabulary]; None on tensor-parallel ranks that get none.

        Args:
            hidden: [1, hidden size], as `Lane.finish` takes it.
        """
        with torch.inference_mode(), without_adapters(self.model.module, 1):
            module: Any = self.model.module
            found = module.compute_logits(hidden)
        return None if found is None else found[0].double()

    def attend(self, index: int, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               output: torch.Tensor) -> None:
        """Called by the stand-ins: gives each lane its rows."""
        heads, size = layer.attention.num_heads, layer.attention.head_size
        out = output.view(-1, heads, size)
        more = False
        if self._clears_padding:
            out[self._running[-1][2].stop :] = 0
        for lane, part, at in self._running:
            result = lane.attend(index, layer, part, q[at], k[at], v[at])
            if result is not None:
                out[at] = result
                more = True
        if not more:
            raise _Stop

    def run_tile(self, tile: Tile) -> None:
        """One forward over parts of lanes, at most `max_rows` rows; a lane's parts must come in order."""
        at, self._running = 0, []
        for lane, part in tile:
            count = part.rows.stop - part.rows.start
            self._running.append((lane, part, slice(at, at + count)))
            at += count
        device = self.model.device
        # vLLM's compiled code is specialised on these very dtypes; others give wrong results without an error.
        ids = torch.cat([lane.ids[part.rows] for lane, part in tile]).to(device, torch.int32)
        positions = torch.cat([lane.positions[part.rows] for lane, part in tile]).to(device, torch.int64)
        running = self._running
        try:
            hidden = self._run_model(ids, positions)
        except _Stop:
            return
        finally:
            self._running = []
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # some models add states for draft models
        for lane, part, rows in running:
            if part.last:
                lane.finish(hidden[rows][-1:].clone())  # the next replay of the graph overwrites it

    def _run_model(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        graph = self._graphs.smallest(len(ids)) if self._graphs is not None else None
        with torch.inference_mode(), self._swapped(), without_adapters(self.model.module, len(ids)):
            if graph is None:
                return self._call(ids, positions, skip_compiled=not self._compiled)
            with graph.inputs(ids, positions):
                return self._call(graph.ids, graph.positions, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
                                  batch_descriptor=graph.descriptor)

    def _call(self, ids: torch.Tensor, positions: torch.Tensor, **context: Any) -> Any:
        with set_forward_context(None, self.model.vllm_config, num_tokens=len(ids), slot_mapping={}, **context):
            return self.model.module(  # as vLLM's runner calls it; some models have no defaults
                input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        for layer, impl in zip(self.model.layers, self._impls, strict=True):
            layer.attention.impl = impl
        try:
            yield
        finally:
            for layer in self.model.layers:
                layer.attention.impl = layer.impl


def rows_of(tile: Tile) -> int:
    """Rows of a forward."""
    return sum(part.rows.stop - part.rows.start for _, part in tile)


def tiles(lanes: Sequence[Lane], max_rows: int) -> Iterator[list[tuple[Lane, Part]]]:
    """Cuts the lanes' rows, in order, into forwards of at most `max_rows`."""
    tile: list[tuple[Lane, Part]] = []
    room = max_rows
    for lane in lanes:
        start, total = 0, len(lane.positions)
        while start < total:
            count = min(room, total - start)
            tile.append((lane, Part(slice(start, start + count), start + count == total)))
            start, room = start + count, room - count
            if room == 0:
                yield tile
                tile, room = [], max_rows
    if tile:
        yield tile
