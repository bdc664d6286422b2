"""Entries as safetensors files with a checksum."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save

from blendrag.errors import StoreError
from blendrag.private import open_regular
from blendrag.store.entry import KVEntry, on_host
from blendrag.store.rows import Row

_LENGTH_BYTES = 8  # of a safetensors header's length


def write_entry(file: FileIO, entry: KVEntry, metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes an entry in host memory; returns the size in bytes and the checksum of what was written."""
    shared = entry.k.untyped_storage().data_ptr() == entry.v.untyped_storage().data_ptr()
    v = entry.v.clone() if shared else entry.v  # safetensors refuses tensors of one memory
    content = memoryview(save({"k": entry.k, "v": v}, dict(metadata)))
    done = 0
    while done < len(content):  # Linux writes 2 GiB at a time
        done += file.write(content[done:])
    return len(content), blake3(content).hexdigest()


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
    with open_regular(name, folder=folder) as file:
        content = _content(file, row.bytes)
    if content is None or blake3(content).hexdigest() != row.checksum:
        return None
    try:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if json.loads(content[_LENGTH_BYTES:end]).get("__metadata__") != metadata_of(row):
            return None
        tensors = load(content)
        entry = on_host(KVEntry(tensors["k"], tensors["v"]), pin)
    except (SafetensorError, KeyError, ValueError, AttributeError, RecursionError, StoreError):
        return None
    return entry if (entry.k.dtype, tuple(entry.k.shape)) == form else None


def _content(file: FileIO, size: int) -> bytes | None:
    """All of a file; None where it is not `size` bytes long."""
    if os.fstat(file.fileno()).st_size != size:
        return None
    parts, left = [], size
    while left and (part := file.read(left)):  # Linux reads 2 GiB at a time
        parts.append(part)
        left -= len(part)
    if left:
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)
