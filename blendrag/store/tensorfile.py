"""Entries as safetensors files, written from and read into the tensors' own memory, and hashed on the way.

The format: the header's length (8 bytes, little-endian), the header (JSON), the tensors.  Reading and
writing it here instead of through the safetensors package saves a copy of the entry each way, which is
as slow as the disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from blendrag.errors import StoreError
from blendrag.store.entry import DTYPES, KVEntry, entry_in, host_memory

_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_ALIGN = 64


def write_entry(file: FileIO, entry: KVEntry, metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes an entry in host memory; returns the size in bytes and the checksum of what was written."""
    parts = [memoryview(_header(entry, metadata)), _content(entry.k), _content(entry.v)]
    hasher = blake3()
    for part in parts:
        hasher.update(part)
        done = 0
        while done < len(part):  # Linux writes 2 GiB at a time
            done += file.write(part[done:])
    return sum(map(len, parts)), hasher.hexdigest()


def read_entry(path: Path, size: int, checksum: str, pin: bool) -> KVEntry | None:
    """The entry in a file; None where the file's size or checksum is another.

    Raises:
        OSError: the file cannot be read.
    """
    with FileIO(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            return None
        length = file.read(8)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > size - 8:
            return None
        header = file.read(header_bytes)
        data = host_memory(size - 8 - header_bytes, pin)
        content = data.numpy().data
        done = 0
        while done < len(content):
            count = file.readinto(content[done:])
            if not count:
                return None
            done += count
    if blake3(length).update(header).update(content).hexdigest() != checksum:
        return None
    try:
        about: dict[str, Any] = json.loads(header)["k"]
        return entry_in(data, _TORCH[about["dtype"]], tuple(about["shape"]))
    except (ValueError, KeyError, TypeError, RuntimeError, StoreError):
        return None


def _header(entry: KVEntry, metadata: Mapping[str, str]) -> bytes:
    half = entry.k.nbytes
    about = {"dtype": DTYPES[entry.k.dtype], "shape": list(entry.k.shape)}
    header = json.dumps({
        "__metadata__": dict(metadata),
        "k": about | {"data_offsets": [0, half]},
        "v": about | {"data_offsets": [half, 2 * half]},
    }).encode()
    header += b" " * (-(8 + len(header)) % _ALIGN)  # so that a mapped file's tensors are aligned
    return len(header).to_bytes(8, "little") + header


def _content(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
