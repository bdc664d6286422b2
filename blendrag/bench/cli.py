"""The commands of `python -m blendrag.bench`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Measures blendrag: against plain vLLM in the same process, and its parts alone."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@app.command()
def ttft(
    model: Annotated[str, typer.Option(help="Path or name of a model, or smollm2 for the demo model.")] = "smollm2",
    tokens: Annotated[list[int] | None, typer.Option(help="Length of the prompt in tokens; may be repeated.")] = None,
    share: Annotated[float, typer.Option(help="Share of the prompt that is stored chunks.")] = 0.9,
    chunk_tokens: Annotated[int, typer.Option(help="Length of a chunk in tokens.")] = 256,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to measure; the engine's default if none.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Recompute ratio; the policy's default if none.")] = None,
    repeats: Annotated[int, typer.Option(help="Prompts for each figure, each with its chunks in a new order.")] = 5,
    eager: Annotated[bool, typer.Option(help="Run without compiled model code.")] = False,
    dummy: Annotated[bool, typer.Option(help="Random weights: the model folder needs only its configuration.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Time to first token: plain full prefill against blended prompts, median of several."""
    from blendrag.bench.ttft import Figure, measure, table
    from blendrag.engine import BlendEngine
    from blendrag.models import resolve

    lengths = tokens or [2200]
    settings: dict[str, Any] = {"load_format": "dummy"} if dummy else {}
    figures: list[Figure] = []
    with BlendEngine(resolve(model), max_model_len=max(lengths) + 64, max_num_batched_tokens=max(lengths) + 64,
                     enforce_eager=eager, max_num_seqs=8, **settings) as engine:
        for length in lengths:
            found = measure(engine, tokens=length, share=share, chunk_tokens=chunk_tokens, policies=policy or [None],
                            ratio=ratio, repeats=repeats)
            Console(width=110).print(table(found))
            figures += found
    if json_file:
        json_file.write_text(json.dumps([figure.to_dict() for figure in figures], indent=1))


@app.command()
def match(
    chunks: Annotated[int, typer.Option(min=1, help="Stored chunks, of 100 to 500 tokens each.")] = 100_000,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts in tokens.")] = 32_768,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts for each figure, all different.")] = 200,
) -> None:
    """Finding stored chunks in the token ids of a prompt: median and 95th percentile, no engine needed."""
    from blendrag.bench.match import MatchBench, machine, table

    bench = MatchBench(chunks, tokens)
    console = Console(width=110)
    console.print(table(bench.measure(repeats), chunks, tokens))
    console.print(f"Of each, converting the list: {bench.conversion_ms(repeats):.2f} ms.  Adding a chunk: "
                  f"{bench.add_us:.0f} us.\n{machine()}", highlight=False, soft_wrap=True)
