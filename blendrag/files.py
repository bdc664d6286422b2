"""Files that commands write their results to."""

from __future__ import annotations

from pathlib import Path

from blendrag.errors import BlendError


def check_writable(path: Path) -> None:
    """Finds out now, not minutes later; what the file holds stays until there is something better.

    Raises:
        BlendError: it cannot be written.
    """
    try:
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise BlendError(f"{path} cannot be written ({error.strerror}): name another file") from error


def write(path: Path, text: str) -> None:
    """Writes a file; BlendError where that fails."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise BlendError(f"{path} cannot be written ({error.strerror}): name another file") from error
