"""Files and folders that only their owner may read, opened so that nothing else in their place can hang or divert us.

A path that others may write to can hold a FIFO (opening it blocks), a link (it leads elsewhere), a device (it never
ends) or a folder.  What is opened here is a regular file, or an error at once.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def create(path: Path | str, folder: int | None = None) -> FileIO:
    """A new file to write to, which only its owner may read.

    Args:
        folder: an open folder that `path` is relative to.

    Raises:
        OSError: FileExistsError where there is something of that name, even a broken link.
    """
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | _SAFELY, FILE_MODE, dir_fd=folder)
    return FileIO(handle, "r+")


def open_regular(path: Path | str, mode: str = "r", folder: int | None = None) -> FileIO:
    """An existing regular file; the last part of the path is no link.

    Args:
        mode: "r" or "r+".
        folder: an open folder that `path` is relative to.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    handle = os.open(path, (os.O_RDONLY if mode == "r" else os.O_RDWR) | _SAFELY, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return FileIO(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def read(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or is longer than `limit` bytes.
    """
    with open_regular(path) as file:
        content = bytearray()
        while part := file.read(limit + 1 - len(content)):
            content += part
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
        return bytes(content)


def make_own_folder(path: Path) -> None:
    """Makes a folder that only this user may enter, or finds that it is one.

    Raises:
        OSError: PermissionError where what is there is a link, or belongs to or is open to other users.
    """
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not is_own_folder(path):
            raise PermissionError(errno.EPERM, "it is not a folder of this user alone", str(path)) from None


def is_own_folder(path: Path) -> bool:
    """Whether this is a folder, and no link, that only this user may enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
