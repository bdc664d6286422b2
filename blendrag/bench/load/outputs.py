"""Runs a measurement with a progress bar, and shows and writes its figures."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.text import Text

from blendrag.bench.load.measure import OnProgress
from blendrag.bench.load.origin import Origin
from blendrag.bench.load.report import Grid, show
from blendrag.errors import ConfigError
from blendrag.files import check_writable, write
from blendrag.terminal import progress_bars

_WIDTH = 140


class _Figure(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


F = TypeVar("F", bound=_Figure)


class Outputs:
    """Where figures go: the terminal, and files.

    Args:
        title: what is measured.

    Raises:
        BlendError: a file cannot be written.
    """

    def __init__(self, json_file: Path | None, html_file: Path | None, title: str) -> None:
        if json_file is not None and json_file == html_file:
            raise ConfigError(f"--json and --html both name {json_file}: give each a file of its own")
        for file in filter(None, (json_file, html_file)):
            check_writable(file)
        self._json_file = json_file
        self._html_file = html_file
        self._title = title
        self._console = Console()
        if not self._console.is_terminal:  # a pipe is no 80 columns wide
            self._console = Console(width=_WIDTH)

    def measure(self, measurement: Callable[[OnProgress], Coroutine[Any, Any, list[F]]]) -> list[F]:
        """Runs it."""
        with progress_bars(self._console) as on_progress:
            figures = asyncio.run(measurement(on_progress))
        gc.unfreeze()  # vLLM freezes what exists when it starts, and complains where it is deleted only as Python ends
        gc.collect()
        return figures

    def publish(self, figures: Sequence[F], grids: Sequence[Grid],
                page: Callable[[Sequence[F], str, Origin], str]) -> None:
        """Prints tables, and writes the files that were asked for.

        Args:
            page: makes the HTML file of figures, title and origin.
        """
        origin = Origin.now()
        self._console.print(Text(self._title, style="bold"))
        show(self._console, grids)
        for line in (origin.command, origin.line):
            self._console.print(Text(line, style="dim"), soft_wrap=True)
        try:
            if self._json_file:
                content = {"title": self._title, "origin": origin.to_dict(),
                           "figures": [figure.to_dict() for figure in figures]}
                write(self._json_file, json.dumps(content, indent=1) + "\n")
        finally:  # a file that fails takes no other with it
            if self._html_file:
                write(self._html_file, page(figures, self._title, origin))
