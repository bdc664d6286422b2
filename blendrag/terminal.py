"""What several commands show while they work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from blendrag.documents import DocumentWarning


@contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars; yields what to call with (label, done, total), a new bar for each label."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield update


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """One progress bar; yields what to call with (done, total)."""
    with progress_bars(console) as update:
        yield lambda done, total: update(label, done, total)


@contextmanager
def document_warnings(console: Console) -> Iterator[None]:
    """Names each file that is skipped while documents are read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DocumentWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, DocumentWarning):
            console.print(Text(str(warning.message), style="yellow"))
