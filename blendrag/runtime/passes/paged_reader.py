"""Reads K and V out of vLLM's paged cache, whose layout is the attention backend's own.

Where an element of a block lies is found out at start-up: the backend's own writer puts numbers into a block, and the
block's memory is searched for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from blendrag.runtime.model.blend_model import BlendModel, Layer

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_BASE = 128
"""Elements are numbered in digits that every floating-point type of a cache represents exactly."""


class _UnknownLayoutError(Exception):
    """The elements of a block are not where they can be read."""


@dataclass(frozen=True)
class _Layout:
    """Where the elements of K and V lie in a block's memory.

    Attributes:
        dim: dimension of the cache tensor that counts blocks.
        parts: entries of that dimension that make up one of the scheduler's blocks.
        k, v: each an offset and the strides of token, head and component, in elements; or int64
            [tokens, heads, head size] where no strides describe it.
    """

    dim: int
    parts: int
    k: tuple[int, tuple[int, ...]] | torch.Tensor
    v: tuple[int, tuple[int, ...]] | torch.Tensor


class PagedReader:
    """Reads what a request's blocks hold.

    Args:
        model: its paged cache is allocated, and nothing is in it.
        num_blocks: of the paged cache.

    """

    def __init__(self, model: BlendModel, num_blocks: int) -> None:
        self._layers = model.layers
        layouts: dict[Any, _Layout] = {}
        self._layouts: list[_Layout] = []
        for layer in model.layers:
            cache = layer.attention.kv_cache
            key = type(layer.impl), tuple(cache.shape), cache.stride(), cache.dtype, layer.block_size
            if key not in layouts:
                layouts[key] = _probe(layer, num_blocks, model.dtype)
            self._layouts.append(layouts[key])

    def read(self, index: int, block_ids: Sequence[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated) and V of a layer, [tokens, kv heads, head size] each, as they were written.

        Args:
            block_ids: of the layer's KV cache group; the first tokens of a prompt lie in the first blocks.
        """
        layer, layout = self._layers[index], self._layouts[index]
        cache = layer.attention.kv_cache
        blocks = torch.tensor(block_ids[: -(-tokens // layer.block_size)], device=cache.device)
        memory = _memory(cache, layout.dim, layout.parts, blocks)
        shape = layer.block_size, layer.attention.num_kv_heads, layer.attention.head_size
        return _elements(memory, layout.k, shape, tokens), _elements(memory, layout.v, shape, tokens)


@dataclass(frozen=True)
class CachedPrefix:
    """The first tokens of a prompt, as vLLM's prefix cache holds them.

    Attributes:
        block_ids: the request's, per KV cache group.
    """

    reader: PagedReader
    tokens: int
    block_ids: tuple[list[int], ...]

    def layer(self, index: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated) and V of a layer, [tokens, kv heads, head size]."""
        return self.reader.read(index, self.block_ids[group], self.tokens)


def paged_reader(model: BlendModel, kv_cache_config: KVCacheConfig) -> PagedReader | None:
    """A reader of a model's paged cache; None where it cannot be read: passes compute what it holds of prompts."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 or isinstance(groups[0].kv_cache_spec, SlidingWindowSpec):
        return None  # blocks that a window has left are given back
    try:
        return PagedReader(model, kv_cache_config.num_blocks)
    except _UnknownLayoutError as error:
        logger.info("vLLM's paged cache cannot be read (%s): passes compute again what it holds of a prompt", error)
        return None


def _probe(layer: Layer, num_blocks: int, dtype: torch.dtype) -> _Layout:
    cache = layer.attention.kv_cache
    if not isinstance(cache, torch.Tensor) or not cache.is_floating_point():
        raise _UnknownLayoutError(f"{layer.name} has a cache of another kind")
    dims = [dim for dim in range(min(2, cache.dim())) if cache.shape[dim] >= num_blocks > 1
            and cache.shape[dim] % num_blocks == 0]
    for dim in dims:
        parts = cache.shape[dim] // num_blocks
        k, v = (_places(layer, num_blocks - 1, dim, parts, dtype, which) for which in range(2))
        if k is not None and v is not None:
            return _Layout(dim, parts, _strided(k), _strided(v))
    raise _UnknownLayoutError(f"{layer.name} has a cache of shape {list(cache.shape)} and {num_blocks} blocks")


def _places(layer: Layer, block: int, dim: int, parts: int, dtype: torch.dtype, which: int) -> torch.Tensor | None:
    """int64 [tokens, heads, head size]: where each element of K (0) or V (1) lies; None where it is not found."""
    cache = layer.attention.kv_cache
    shape = layer.block_size, layer.attention.num_kv_heads, layer.attention.head_size
    count = shape[0] * shape[1] * shape[2]
    slots = torch.arange(layer.block_size, device=cache.device) + block * layer.block_size
    blocks = torch.tensor([block], device=cache.device)
    numbers = torch.zeros(0, dtype=torch.int64)
    left, scale = torch.arange(count), 1
    while True:
        values = (left % _BASE + 1).to(cache.device, dtype).view(shape)
        pair = [torch.zeros_like(values), torch.zeros_like(values)]
        pair[which] = values
        layer.impl.do_kv_cache_update(layer.attention, *pair, cache, slots)
        digits = _memory(cache, dim, parts, blocks).flatten().double().cpu().round().long() - 1
        layer.impl.do_kv_cache_update(layer.attention, torch.zeros_like(values), torch.zeros_like(values), cache, slots)
        numbers = digits * scale if not len(numbers) else torch.where(digits < 0, -1, numbers + digits * scale)
        left, scale = left // _BASE, scale * _BASE
        if scale >= count:
            break
    at = (numbers >= 0).nonzero()[:, 0]
    if len(at) != count or not torch.equal(numbers[at].sort().values, torch.arange(count)):
        return None
    places = torch.empty(count, dtype=torch.int64)
    places[numbers[at]] = at
    return places.view(shape).to(cache.device)


def _strided(places: torch.Tensor) -> tuple[int, tuple[int, ...]] | torch.Tensor:
    """The offset and strides that describe places, where there are such."""
    offset = int(places[0, 0, 0])
    strides, expected = [], torch.full_like(places, offset)
    for dim, length in enumerate(places.shape):
        index = [0, 0, 0]
        index[dim] = min(1, length - 1)
        strides.append(int(places[tuple(index)]) - offset)
        steps = [1, 1, 1]
        steps[dim] = length
        expected = expected + strides[-1] * torch.arange(length, device=places.device).view(steps)
    return (offset, tuple(strides)) if torch.equal(expected, places) and min(strides) >= 0 else places


def _memory(cache: torch.Tensor, dim: int, parts: int, blocks: torch.Tensor) -> torch.Tensor:
    """A copy of some blocks' memory, [blocks, elements]."""
    at = (blocks[:, None] * parts + torch.arange(parts, device=blocks.device)).flatten()
    return cache.index_select(dim, at).movedim(dim, 0).reshape(len(blocks), -1)


def _elements(memory: torch.Tensor, where: tuple[int, tuple[int, ...]] | torch.Tensor, shape: tuple[int, ...],
              tokens: int) -> torch.Tensor:
    if isinstance(where, torch.Tensor):
        elements = memory[:, where.flatten()].view(len(memory), *shape)
    else:
        offset, strides = where
        elements = memory.as_strided((len(memory), *shape), (memory.stride(0), *strides), offset)
    return elements.flatten(0, 1)[:tokens]
