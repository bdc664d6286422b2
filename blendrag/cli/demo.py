"""`blendrag demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blendrag.cli.environment import prepare

STORE = Path("~/.cache/blendrag/demo-store")


def demo(
    docs: Annotated[Path | None, typer.Argument(
        help="A folder of .md, .txt, .html and .pdf files, or one file; blendrag's own documentation if left out.",
    )] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was measured to this file.")] = None,
    model: Annotated[str, typer.Option(help="smollm2, or a folder or hub name that vLLM loads.")] = "smollm2",
    question: Annotated[list[str] | None, typer.Option(help="Ask this instead; repeat it for more.")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of a chunk.")] = 256,
    top_k: Annotated[int | None, typer.Option(
        min=1, help="Chunks for each question; as many as make about 2,000 tokens by default.")] = None,
    store: Annotated[Path, typer.Option(help="Where chunks are kept between runs.")] = STORE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log lines of vLLM and its libraries.")] = False,
) -> None:
    """Answer questions from documents, by a plain full prefill and by blending, and compare."""
    engine_args = prepare(verbose)
    from blendrag.demo import DemoSettings, run_demo

    settings = DemoSettings(docs=docs, model=model, questions=question or (), chunk_tokens=chunk_tokens, top_k=top_k,
                            store=store, json_file=json_file, engine_args=engine_args)
    run_demo(settings, Console())
