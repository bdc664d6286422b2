"""Why an engine's process ended: it leaves a note for the process that started it.

vLLM tells the parent that its engine process is gone; the reason is only in that process' log.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from blendrag import errors
from blendrag.errors import BlendError

_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")


class FailureNote:
    """The parent's side: a file that an engine's processes can write to.

    Args:
        engine_id: known to all processes of this engine, and to nobody else.
    """

    def __init__(self, engine_id: str) -> None:
        self._path = _path(engine_id)
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def read(self) -> tuple[str, str] | None:
        """Class and text of the exception that ended the engine; None where none was noted."""
        try:
            kind, message = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return kind, message

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)


def leave_notes(engine_id: str) -> None:
    """Called in an engine's process: notes the exception it dies of, where the parent asked for notes."""
    path = _path(engine_id)
    if path.exists():
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(_Noter(path))


def as_error(kind: str, message: str) -> BlendError | None:
    """blendrag's own error of that class name; None for any other class."""
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, BlendError) else None


class _Noter(logging.Handler):
    """Notes the first exception that vLLM logs: these loggers log what ends a process, and little else."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        with suppress(OSError):  # the parent is gone
            # Ranks that stop because another one failed come later.
            if self._path.stat().st_size == 0:
                self._path.write_text(json.dumps([type(error).__name__, str(error)]), "utf-8")


def _path(engine_id: str) -> Path:
    return Path(tempfile.gettempdir(), f"blendrag-{engine_id}.failure")
