"""The files of the disk tier: how they are named, written and locked.

An entry's file is named by its key and its model's fingerprint, whatever the manifest says.  The folders on the way to
it are opened one by one, without following links, so that no name leads out of the store.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from blendrag.private import FOLDER_MODE, create, open_regular

# Nothing but what has these names is ever removed: people put a store among files of their own.
_OUTER = re.compile(r"[0-9A-Za-z_-]{1,16}")
_INNER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.tmp")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OCCUPIED = {errno.ENOTDIR, errno.ELOOP}
_LOCK_S = 30.0
_RETRY_S = 0.02


def place_of(fingerprint: str, key: str) -> str:
    """Where an entry's file is, relative to the store's folder."""
    return f"{fingerprint[:16]}/{key[:2]}/{key}.safetensors"


@contextmanager
def folder_of(path: Path, place: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder of a file of the store, and the file's name in it.

    Args:
        place: of the file, relative to `path`.
        make: make the folders that are not there; what occupies the name of the inner one is put aside.

    Raises:
        OSError: there is no such folder, or something else has its name.
    """
    outer, inner, name = place.split("/")
    handle = os.open(path, _FOLDER)
    try:
        for part in (outer, inner):
            try:
                below = _enter(handle, part, make)
            except OSError as error:
                if not make or part == outer or error.errno not in _OCCUPIED:
                    raise
                vacate(handle, part)
                below = _enter(handle, part, make)
            os.close(handle)
            handle = below
        yield handle, name
    finally:
        os.close(handle)


def _enter(folder: int, name: str, make: bool) -> int:
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, FOLDER_MODE, dir_fd=folder)
            os.fsync(folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def vacate(folder: int, name: str) -> None:
    """Frees the name of an entry's file: removes what has it, and renames a folder, whose content is not ours.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        aside = f".{name}.{secrets.token_hex(4)}.aside"
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)


def remove(path: Path, place: str) -> None:
    """Removes an entry's file; nothing where there is none.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        with folder_of(path, place) as (folder, name):
            vacate(folder, name)
    except OSError as error:
        if error.errno not in {*_OCCUPIED, errno.ENOENT}:  # something else has the folder's name: the file is gone
            raise


@dataclass
class Found:
    """The files of a store, relative to its folder.

    Attributes:
        entries: regular files that are named as entries.
        others: folders, links and so on that are named as entries.
        unfinished: what is named as a file that is being written.
    """

    entries: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    unfinished: list[str] = field(default_factory=list)


def scan(path: Path) -> Found:
    """What has the names of the store's files."""
    found = Found()
    for outer in _folders(path, _OUTER):
        for inner in _folders(path / outer, _INNER):
            where = f"{outer}/{inner}/"
            with suppress(OSError), os.scandir(path / outer / inner) as items:  # one that cannot be read holds nothing
                for item in items:
                    name = item.name
                    if _ENTRY.fullmatch(name) and name.startswith(inner):
                        (found.entries if item.is_file(follow_symlinks=False) else found.others).add(where + name)
                    elif _UNFINISHED.fullmatch(name):
                        found.unfinished.append(where + name)
    return found


def _folders(path: Path, named: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(path) as items:
            return [item.name for item in items if named.fullmatch(item.name) and item.is_dir(follow_symlinks=False)]
    except OSError:  # another user's folder, or one that has just gone
        return []


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lets one process at a time open the store.

    Raises:
        OSError: BlockingIOError where another process has been opening it for half a minute.
    """
    handle = os.open(folder, _FOLDER)
    try:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_S)
        yield
    finally:
        os.close(handle)


@contextmanager
def unfinished(folder: int, key: str) -> Iterator[tuple[FileIO, str]]:
    """A file to write to, and its name in an open folder.

    It is locked as long as its writer lives, and gone afterwards unless it was renamed.
    """
    while True:
        name = f".{key}.{secrets.token_hex(4)}.tmp"
        with create(name, folder) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # A process that opens the store may have removed the file before it was locked.
                if os.fstat(file.fileno()).st_nlink:
                    yield file, name
                    return
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)


def remove_if_abandoned(path: Path, place: str) -> None:
    """Removes an unfinished file whose writer no longer lives; anything else of that name stays where it is."""
    with suppress(OSError), folder_of(path, place) as (folder, name), open_regular(name, folder=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, _FOLDER)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
