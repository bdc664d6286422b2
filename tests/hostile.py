"""What may be in the place of a file: everything but a regular file, and files that never end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

Put = Callable[[Path], object]


def _folder_with_content(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _link_to_a_file(path: Path) -> None:
    target = path.parent / "target-of-a-link"
    target.write_text("mine")
    path.symlink_to(target)


PUT: dict[str, Put] = {
    "folder": Path.mkdir,
    "folder with content": _folder_with_content,
    "fifo": os.mkfifo,
    "socket": _socket,
    "link to a file": _link_to_a_file,
    "link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("/nonexistent/x"),
    "link to itself": _link_to_itself,
    "link of too long a name": lambda path: path.symlink_to("x" * 300),
    "huge file": _huge,
    "empty file": Path.touch,
}
"""What makes it, at a path where nothing is, by name."""
