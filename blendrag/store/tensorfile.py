"""Entries as safetensors files with a checksum."""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save

from blendrag.errors import StoreError
from blendrag.store.entry import KVEntry, on_host


def write_entry(file: FileIO, entry: KVEntry, metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes an entry in host memory; returns the size in bytes and the checksum of what was written."""
    shared = entry.k.untyped_storage().data_ptr() == entry.v.untyped_storage().data_ptr()
    v = entry.v.clone() if shared else entry.v  # safetensors refuses tensors of one memory
    content = memoryview(save({"k": entry.k, "v": v}, dict(metadata)))
    done = 0
    while done < len(content):  # Linux writes 2 GiB at a time
        done += file.write(content[done:])
    return len(content), blake3(content).hexdigest()


def read_entry(path: Path, size: int, checksum: str, pin: bool) -> KVEntry | None:
    """The entry in a file; None where the file's size or checksum is another.

    Raises:
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    if len(content) != size or blake3(content).hexdigest() != checksum:
        return None
    try:
        tensors = load(content)
        return on_host(KVEntry(tensors["k"], tensors["v"]), pin)
    except (SafetensorError, KeyError, StoreError):
        return None
