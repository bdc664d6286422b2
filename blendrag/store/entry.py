"""What the store holds: the keys and values of one chunk."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from blendrag.errors import StoreError
from blendrag.store.arena import PAGE_LOCKED, aligned

_log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
          torch.uint8)
"""What KV may be made of."""

_SLACK = 4096


@dataclass(frozen=True, eq=False)
class KVEntry:
    """The KV of a chunk, in every layer.

    Attributes:
        k: keys without rotation, [layers, tokens, kv heads, head size].
        v: values, of the same shape, dtype and device.

    Raises:
        StoreError: the two do not fit together, are empty, or have a dtype that KV does not have.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if (k.shape, k.dtype, k.device) != (v.shape, v.dtype, v.device):
            raise StoreError(f"keys are {_describe(k)} but values are {_describe(v)}: an entry needs two of a kind")
        if k.ndim != 4 or not k.numel():
            raise StoreError(f"KV is {_describe(k)}: an entry needs [layers, tokens, kv heads, head size], none empty")
        if k.dtype not in DTYPES:
            raise StoreError(f"KV of {k.dtype} cannot be stored: use {', '.join(map(dtype_name, DTYPES))}")

    def __repr__(self) -> str:
        return f"KVEntry({_describe(self.k)})"

    @property
    def tokens(self) -> int:
        """Length of the chunk in tokens."""
        return int(self.k.shape[1])

    @property
    def nbytes(self) -> int:
        """Size of keys and values together, in bytes."""
        return self.k.nbytes + self.v.nbytes


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def host_memory(size: int, pin: bool) -> torch.Tensor:
    """So many bytes of host memory; page-locked where asked for and where the system has that much to lock."""
    if pin:
        try:
            return PAGE_LOCKED.take(size)
        except RuntimeError as error:
            _log.warning("%d bytes could not be page-locked, ordinary memory is used: %s", size, error)
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _host_copy(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    """A copy in host memory."""
    source = tensor.detach()
    return host_memory(source.nbytes, pin).view(source.dtype).view(source.shape).copy_(source)


def on_host(entry: KVEntry, pin: bool) -> KVEntry:
    """The entry in host memory, contiguous, holding on to nothing but itself; the same tensors where they are so.

    Args:
        pin: in page-locked memory, from which a GPU can copy while it computes.
    """
    tensors = (entry.k, entry.v)
    fits = all(t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad for t in tensors)
    if fits and sum(_storages(entry)) <= entry.nbytes + _SLACK and (not pin or all(t.is_pinned() for t in tensors)):
        return entry
    return KVEntry(_host_copy(entry.k, pin), _host_copy(entry.v, pin))


def held_bytes(entry: KVEntry, pinned: bool) -> int:
    """Host memory that the entry keeps from others, in bytes."""
    return sum(aligned(size) if pinned else size for size in _storages(entry))


def _storages(entry: KVEntry) -> list[int]:
    storages = [t.untyped_storage() for t in (entry.k, entry.v)]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
