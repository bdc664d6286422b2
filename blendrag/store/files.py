"""The files of the disk tier: how they are named, written and locked."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

# Nothing but what has these names is ever removed: people put a store among files of their own.
_OUTER = re.compile(r"[0-9A-Za-z_-]{1,16}")
_INNER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.tmp")


def folder_of(path: Path, fingerprint: str, key: str) -> Path:
    """The folder of an entry's file, which is made if it is not there."""
    folder = path
    for name in (fingerprint[:16], key[:2]):
        with suppress(FileExistsError):
            (folder / name).mkdir()
            sync_folder(folder)
        folder /= name
    return folder


def scan(path: Path) -> tuple[set[str], list[Path]]:
    """The files of entries, relative to `path`, and those that nobody finished."""
    entries: set[str] = set()
    unfinished: list[Path] = []
    for outer in _folders(path, _OUTER):
        for inner in _folders(outer, _INNER):
            where = f"{outer.name}/{inner.name}/"
            for name in os.listdir(inner):  # noqa: PTH208 a Path for each of 100,000 files takes a second
                if _ENTRY.fullmatch(name) and name.startswith(inner.name):
                    entries.add(where + name)
                elif _UNFINISHED.fullmatch(name):
                    unfinished.append(inner / name)
    return entries, unfinished


def _folders(path: Path, named: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(path) as found:
            return [path / item.name for item in found if named.fullmatch(item.name) and item.is_dir()]
    except PermissionError:  # a folder of somebody else's
        return []


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lets one process at a time open the store."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def unfinished(folder: Path, key: str) -> Iterator[tuple[FileIO, Path]]:
    """A file to write to, locked as long as its writer lives, and gone afterwards unless it was renamed."""
    while True:
        path = folder / f".{key}.{secrets.token_hex(4)}.tmp"
        with FileIO(path, "x") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # A process that opens the store may have removed the file before it was locked.
                if os.fstat(file.fileno()).st_nlink:
                    yield file, path
                    return
            finally:
                path.unlink(missing_ok=True)


def remove_if_abandoned(path: Path) -> None:
    """Removes an unfinished file whose writer no longer lives."""
    with suppress(FileNotFoundError, BlockingIOError), FileIO(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
