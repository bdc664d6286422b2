"""`blendrag index`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from blendrag.cli.environment import prepare

if TYPE_CHECKING:
    from blendrag.config import BlendConfig


def index(
    docs: Annotated[Path, typer.Argument(help="A folder of .md, .txt, .html and .pdf files, or one file.")],
    model: Annotated[str, typer.Option(help="smollm2, or a folder or hub name that vLLM loads.")],
    store: Annotated[Path, typer.Option(help="The folder of the chunk store (BlendConfig.store_path).")],
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of a chunk.")] = 256,
    namespace: Annotated[str | None, typer.Option(help="Chunks are shared within a namespace only.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log lines of vLLM and its libraries.")] = False,
) -> None:
    """Compute and store the KV of every chunk of a folder, for any prompt to come."""
    engine_args = prepare(verbose)
    from blendrag.config import BlendConfig

    config = BlendConfig(store_path=store, **({"namespace": namespace} if namespace else {}))
    run_index(docs, model, config, chunk_tokens, Console(), engine_args)


def run_index(docs: Path, model: str, config: BlendConfig, chunk_tokens: int, console: Console,
              engine_args: dict[str, Any]) -> None:
    """Stores the neutral variant of every chunk of a folder, and says how many there are.

    Raises:
        BlendError: nothing to read, a model that cannot be loaded, a store that cannot be written.
    """
    from blendrag.documents import read_folder, split
    from blendrag.engine import BlendEngine
    from blendrag.models import engine_arguments, resolve
    from blendrag.terminal import document_warnings, progress_bar

    with document_warnings(console):
        sources = read_folder(docs)
    with BlendEngine(resolve(model), config=config, **(engine_arguments(model) | engine_args)) as engine:
        with console.status("starting vLLM"):
            tokens = engine.tokens
        chunks = [c for source in sources for c in split(source, lambda t: len(tokens.chunk_ids(t)), chunk_tokens)]
        started = time.monotonic()
        with progress_bar(console, "computing the chunks' KV") as on_progress:
            encoded = engine.encode(chunks, on_progress=on_progress)
        seconds = time.monotonic() - started
        new = sum(chunk.new for chunk in encoded)
        short = sum(not chunk.key for chunk in encoded)
        console.print(Text(
            f"{len(chunks)} chunks of {len(sources)} documents, {sum(c.tokens for c in encoded):,} tokens: "
            f"{new} computed, {len(chunks) - new - short} stored already, {short} too short to store; {seconds:.1f} s, "
            f"{engine.store.stats.disk_bytes:,} bytes in {engine.store.path}"), soft_wrap=True)
