"""Entries as safetensors files with a checksum, written from where they lie and read to where they will."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from io import FileIO
from math import prod
from queue import SimpleQueue

import torch
from blake3 import blake3

from blendrag.private import open_regular
from blendrag.store.entry import KVEntry, host_memory
from blendrag.store.rows import Row

_LENGTH_BYTES = 8  # of a safetensors header's length
_ALIGNMENT = 8
_PIECE = 2 * 2**20
_THREAD_BYTES = 8 * 2**20
"""Less is hashed about as soon as a thread on a busy machine begins."""

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
          torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8"}


def write_entry(file: FileIO, entry: KVEntry, metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes an entry in host memory, and brings it to the disk.

    Returns:
        the size in bytes, and the checksum of what was written.
    """
    header = _header(entry.k.dtype, tuple(entry.k.shape), metadata)
    parts = [memoryview(header), bytes_of(entry.k), bytes_of(entry.v)]
    size = sum(map(len, parts))
    with _Checksum(size) as checksum:
        for part in parts:
            checksum.add(part)
        left = parts
        while left:  # Linux writes 2 GiB at a time
            written = os.writev(file.fileno(), left)
            while left and written >= len(left[0]):
                written -= len(left[0])
                left = left[1:]
            if written:
                left = [left[0][written:], *left[1:]]
        os.fsync(file.fileno())
    return size, checksum.value


def metadata_of(row: Row) -> dict[str, str]:
    """What an entry's file says of itself, so that files that were exchanged are noticed."""
    return {"key": row.key, "fingerprint": row.fingerprint, "namespace": row.namespace}


def read_entry(folder: int, name: str, row: Row, pin: bool) -> KVEntry | None:
    """The entry in a file, of which no more is read than its row says there is.

    Args:
        folder: the open folder that the file is in.

    Returns:
        None where the file's size, checksum, metadata, dtype or shape is not the row's.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    form = row.form()
    if form is None:
        return None
    dtype, shape = form
    each = prod(shape) * dtype.itemsize
    with open_regular(name, folder=folder) as file:
        if os.fstat(file.fileno()).st_size != row.bytes:
            return None
        os.posix_fadvise(file.fileno(), 0, row.bytes, os.POSIX_FADV_WILLNEED)  # all of it is under way at once
        header, both = bytearray(row.bytes - 2 * each), host_memory(2 * each, pin)
        with _Checksum(row.bytes) as checksum:
            complete = all([_read(file, memoryview(header), checksum), _read(file, bytes_of(both), checksum)])
    if not complete or checksum.value != row.checksum or not _describes(header, dtype, shape, metadata_of(row)):
        return None
    return KVEntry(both[:each].view(dtype).view(shape), both[each:].view(dtype).view(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    content: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return content


def _read(file: FileIO, into: memoryview, checksum: _Checksum) -> bool:
    """Fills the memory from a file; False where that ends before."""
    while len(into):
        count = file.readinto(into[:_PIECE])
        if not count:
            return False
        checksum.add(into[:count])
        into = into[count:]
    return True


def _header(dtype: torch.dtype, shape: tuple[int, ...], metadata: Mapping[str, str]) -> bytes:
    """What stands before the bytes of keys and values, its length included."""
    text = json.dumps({"__metadata__": dict(metadata), **_tensors(dtype, shape)}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, object]:
    """How a header describes keys, and values behind them."""
    each = prod(shape) * dtype.itemsize
    return {name: {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, start + each]}
            for name, start in (("k", 0), ("v", each))}


def _describes(header: bytearray, dtype: torch.dtype, shape: tuple[int, ...], metadata: Mapping[str, str]) -> bool:
    """Whether a header is that of such an entry."""
    if int.from_bytes(header[:_LENGTH_BYTES], "little") != len(header) - _LENGTH_BYTES:
        return False
    try:
        found = json.loads(header[_LENGTH_BYTES:])
    except (ValueError, RecursionError):
        return False
    return bool(found == {"__metadata__": metadata, **_tensors(dtype, shape)})


class _Checksum:
    """The BLAKE3 of bytes, taken by a thread while they are written, or more of them are read.

    Args:
        size: of all bytes; a thread does not pay for few.

    Attributes:
        value: 64 hex digits, after the `with` block.
    """

    def __init__(self, size: int) -> None:
        self.value = ""
        self._hash = blake3()
        self._queue: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="blendrag-checksum") if size > _THREAD_BYTES else None

    def add(self, content: memoryview) -> None:
        """Takes the next bytes, which stay as they are until the end."""
        if self._thread is None:
            self._hash.update(content)
        else:
            self._queue.put(content)

    def __enter__(self) -> _Checksum:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self.value = self._hash.hexdigest()

    def _work(self) -> None:
        while (content := self._queue.get()) is not None:
            self._hash.update(content)
