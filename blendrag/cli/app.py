"""The commands of `blendrag`, each in a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from blendrag import __version__
from blendrag.cli import calibrate, demo, eval, index, models, serve  # noqa: A004
from blendrag.errors import BlendError


class _Commands(TyperGroup):
    """Prints blendrag's own errors as one sentence; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BlendError as error:
            Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "red"), str(error)))
            raise typer.Exit(1) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Reuse the KV cache of document chunks at any place in a prompt.")
app.command("demo")(demo.demo)
app.command("index")(index.index)
to_vllm = {"allow_extra_args": True, "ignore_unknown_options": True}  # what is not ours is an option of vLLM's
app.command("eval", epilog=eval.EPILOG, context_settings=to_vllm)(eval.evaluate)
app.command("calibrate", epilog=calibrate.EPILOG, context_settings=to_vllm)(calibrate.calibrate)
app.command("serve", epilog=serve.EPILOG, context_settings=to_vllm)(serve.serve)
app.add_typer(models.app, name="models", help="The demo's models.")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"blendrag {__version__}")
        raise typer.Exit


@app.callback()
def main(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                               help="Show the version and exit.")] = False) -> None:
    """Options of blendrag itself."""
