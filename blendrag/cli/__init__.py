"""The `blendrag` command."""

from blendrag.cli.app import app

__all__ = ["app"]
