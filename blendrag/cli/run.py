"""Entry point of the `blendrag` command."""

from __future__ import annotations

from blendrag.cli.app import app


def run() -> None:
    """Runs the command and leaves with its exit code."""
    app(prog_name="blendrag")
