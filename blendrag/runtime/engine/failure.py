"""Why an engine's process ended: it leaves a note for the process that started it.

vLLM tells the parent that its engine process is gone; the reason is only in that process' log.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from blendrag import errors
from blendrag.errors import BlendError, InternalError
from blendrag.private import create, open_regular, read

_PACKAGE = Path(errors.__file__).parent
_CALLERS = "worker.py", "connector.py"
"""Files that call vLLM's own classes; so does runtime/engine."""
_LONGEST = 2**20
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")


class FailureNote:
    """The parent's side: a file that an engine's processes can write to.

    Args:
        engine_id: known to all processes of this engine, and to no others.
    """

    def __init__(self, engine_id: str) -> None:
        self._path = _path(engine_id)
        create(self._path).close()

    def read(self) -> tuple[str, str] | None:
        """Class and text of the exception that ended the engine; None where none was noted."""
        try:
            kind, message = json.loads(read(self._path, _LONGEST))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return str(kind), str(message)

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)


def leave_notes(engine_id: str) -> None:
    """Called in an engine's process: notes the exception it dies of, where the parent asked for notes."""
    path = _path(engine_id)
    with suppress(OSError, ValueError):  # an id that a user set may be no file name
        open_regular(path).close()
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(_Noter(path))


def as_error(kind: str, message: str) -> BlendError | None:
    """blendrag's own error of that class name; None for any other class."""
    found = getattr(errors, kind, None)
    return found(message) if isinstance(found, type) and issubclass(found, BlendError) else None


def own_fault(error: BaseException) -> InternalError | None:
    """What to raise instead of an exception that comes from blendrag's own code; None for those that vLLM raises.

    vLLM's code runs within ours as well: `BlendWorker` calls the worker that it is derived from.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [number for number, (frame, _) in enumerate(frames) if _PACKAGE in Path(frame.f_code.co_filename).parents]
    if isinstance(error, (BlendError, MemoryError, torch.OutOfMemoryError)) or not ours:
        return None
    frame, line = frames[ours[-1]]
    place = Path(frame.f_code.co_filename).relative_to(_PACKAGE)
    if ours[-1] < len(frames) - 1 and (place.parts[:2] == ("runtime", "engine") or place.name in _CALLERS):
        return None
    return InternalError(f"blendrag failed ({type(error).__name__}: {error}, in {place}, line {line}), which neither "
                         "the model's path nor an engine argument explains: report it with the log, and use vLLM "
                         "alone meanwhile")


def result_of(answers: Sequence[tuple[Any, tuple[str, str] | None]]) -> Any:
    """What the first rank's `BlendWorker` method returned, of all ranks' answers to a `blendrag_call`.

    Raises:
        BlendError: what a rank raised, where it is one of ours; a RuntimeError with its class and text otherwise.
    """
    for _, failure in answers:
        if failure is not None:
            raise as_error(*failure) or RuntimeError(": ".join(failure))
    return answers[0][0]


class _Noter(logging.Handler):
    """Notes the first exception that vLLM logs: these loggers log what ends a process, and little else."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        error = own_fault(error) or error
        note = json.dumps([type(error).__name__, str(error)[: _LONGEST // 12]]).encode()
        with suppress(OSError), open_regular(self._path, "r+") as file:  # not where the parent is gone
            # Ranks that stop because another one failed come later.
            if os.fstat(file.fileno()).st_size == 0:
                file.write(note)


def _path(engine_id: str) -> Path:
    # vLLM draws the id: no other user can guess the name.
    return Path(tempfile.gettempdir(), f"blendrag-{engine_id}.failure")
