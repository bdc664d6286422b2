"""Entry point of the `blendrag` command."""

from __future__ import annotations

import os
import sys

from blendrag.cli.app import app


def run() -> None:
    """Runs the command and leaves with its exit code."""
    try:
        app(prog_name="blendrag")
    except SystemExit as end:
        if end.code and "vllm" in sys.modules:
            # Native threads that a failed start of vLLM leaves behind would abort the interpreter's shutdown.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise
