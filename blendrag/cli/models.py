"""`blendrag models`."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.cli.environment import prepare

app = typer.Typer(no_args_is_help=True)


@app.callback()
def models() -> None:
    """The demo's models."""


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2 (the language model) or minilm (the embedder).")]) -> None:
    """Fetch a demo model, unless it is there, and print its folder."""
    prepare(verbose=False)
    from blendrag.models import fetch as fetch_model

    typer.echo(fetch_model(name))
