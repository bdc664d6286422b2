"""The commands of `python -m blendrag.bench`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from blendrag.bench.load.outputs import Outputs
from blendrag.bench.load.target import Target
from blendrag.bench.load.turns import Style
from blendrag.bench.load.workload import Shape
from blendrag.cli.environment import prepare
from blendrag.errors import ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_TO_VLLM = {"allow_extra_args": True, "ignore_unknown_options": True}  # what is not ours is an option of vLLM's
_EPILOG = "Any engine option of vLLM may follow, such as --enforce-eager or --max-num-batched-tokens 2048."

Model = Annotated[str, typer.Option(help="Path or name of a model, or smollm2 for the demo model.")]
Http = Annotated[str | None, typer.Option(
    metavar="URL", help="Measure the OpenAI server that runs there (blending, and with VLLM_SERVER_DEV_MODE=1 so that "
    "its prefix cache can be emptied); OPENAI_API_KEY is its key.")]
PlainHttp = Annotated[str | None, typer.Option(
    metavar="URL", help="The arm plain uses this server, a stock `vllm serve`, not the other with blending off.")]
Server = Annotated[bool, typer.Option("--server", help="Start `blendrag serve` and measure through HTTP.")]
Settings = Annotated[Path | None, typer.Option(
    help="A YAML file of BlendConfig's settings; a store_path in it is measured, and filled with made-up documents.")]
Documents = Annotated[int, typer.Option(min=1, help="Documents of the pool, stored before.")]
DocumentTokens = Annotated[int, typer.Option(min=16, help="Length of a document.")]
SystemTokens = Annotated[int, typer.Option(min=1, help="Length of the system prompt.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Length of a question.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Length of an answer.")]
Data = Annotated[Path | None, typer.Option(
    help="Take the documents from this data set (examples/data/multihop.json), as `blendrag eval` reads it.")]
Seed = Annotated[int, typer.Option(help="Of all that is random.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page with curves to this file.")]


@app.callback()
def main() -> None:
    """Measures blendrag: against plain vLLM in the same process, and its parts alone."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@app.command()
def ttft(
    model: Model = "smollm2",
    tokens: Annotated[list[int] | None, typer.Option(help="Length of the prompt in tokens; may be repeated.")] = None,
    share: Annotated[float, typer.Option(help="Share of the prompt that is stored chunks.")] = 0.9,
    chunk_tokens: Annotated[int, typer.Option(help="Length of a chunk in tokens.")] = 256,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to measure; the engine's default if none.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Recompute ratio; the policy's default if none.")] = None,
    repeats: Annotated[int, typer.Option(help="Prompts for each figure, each with its chunks in a new order.")] = 5,
    eager: Annotated[bool, typer.Option(help="Run without compiled model code.")] = False,
    dummy: Annotated[bool, typer.Option(help="Random weights: the model folder needs only its configuration.")] = False,
    json_file: Json = None,
) -> None:
    """Time to first token: plain full prefill against blended prompts, median of several."""
    from blendrag.bench.ttft import Figure, measure, table
    from blendrag.config import BlendConfig
    from blendrag.engine import BlendEngine
    from blendrag.models import resolve

    lengths = tokens or [2200]
    settings: dict[str, Any] = {"load_format": "dummy"} if dummy else {}
    figures: list[Figure] = []
    with BlendEngine(resolve(model), config=BlendConfig(blend="always"), max_model_len=max(lengths) + 64,
                     max_num_batched_tokens=max(lengths) + 64, enforce_eager=eager, max_num_seqs=8,
                     **settings) as engine:
        for length in lengths:
            found = measure(engine, tokens=length, share=share, chunk_tokens=chunk_tokens, policies=policy or [None],
                            ratio=ratio, repeats=repeats)
            Console(width=110).print(table(found))
            figures += found
    if json_file:
        json_file.write_text(json.dumps([figure.to_dict() for figure in figures], indent=1))


@app.command()
def sweep(
    model: Annotated[list[str] | None, typer.Option(
        help="Path or name of a model, or smollm2 for the demo model; may be repeated.")] = None,
    lengths: Annotated[list[int] | None, typer.Option(
        show_default="200 to 8,000", help="Length of the prompt in tokens; may be repeated.")] = None,
    rates: Annotated[list[float] | None, typer.Option(
        min=0, max=1, show_default="0, .25, .5, .75, 1", help="Share of the chunks that is stored.")] = None,
    chunks: Annotated[list[int] | None, typer.Option(
        min=16, show_default="64, 512", help="Length of a chunk in tokens; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each kind, plain and ours in turns.")] = 5,
    always: Annotated[bool, typer.Option(help="Blend whatever is stored, to see what the gate saves.")] = False,
    processor_time: Annotated[bool, typer.Option(
        help="Measure this process' processor time, on a busy machine and with OMP_NUM_THREADS=1.")] = False,
    eager: Annotated[bool, typer.Option(help="Run without compiled model code.")] = False,
    dummy: Annotated[bool, typer.Option(help="Random weights: the model folder needs only its configuration.")] = False,
    batched_tokens: Annotated[int, typer.Option(min=64, help="vLLM's max_num_batched_tokens.")] = 2048,
    json_file: Json = None,
) -> None:
    """No request slower than without us: the first token's time against plain vLLM, over lengths and hit rates."""
    from blendrag.bench.sweep import CHUNKS, LENGTHS, RATES, Cell, Grid, measure, table, worst
    from blendrag.config import BlendConfig
    from blendrag.engine import BlendEngine
    from blendrag.models import resolve

    grid = Grid(lengths or LENGTHS, rates or RATES, chunks or CHUNKS, repeats)
    settings: dict[str, Any] = {"load_format": "dummy"} if dummy else {}
    clock = time.process_time if processor_time else time.perf_counter
    config = BlendConfig(blend="always" if always else "auto", populate="never")
    cells: list[Cell] = []
    for name in model or ["smollm2"]:
        with BlendEngine(resolve(name), config=config, max_model_len=max(grid.lengths) + 64, max_num_seqs=8,
                         max_num_batched_tokens=batched_tokens, enforce_eager=eager, **settings) as engine:
            mine: list[Cell] = []
            for cell in measure(engine, grid, clock):
                mine.append(cell)
                typer.echo(json.dumps(cell.to_dict()), err=True)
        Console(width=110).print(table(mine))
        cells += mine
    slowest = worst(cells)
    typer.echo(f"Worst: {slowest.ratio:.3f} with {slowest.length:,} tokens in chunks of {slowest.chunk_tokens}, "
               f"{slowest.rate:.0%} stored ({slowest.model}).")
    if json_file:
        json_file.write_text(json.dumps([cell.to_dict() for cell in cells], indent=1))


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


@app.command()
def store(
    megabytes: Annotated[list[int] | None, typer.Option(
        min=1, show_default="4, 64", help="Size of an entry; may be repeated.")] = None,
    path: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Entries for each figure.")] = 9,
    group: Annotated[int, typer.Option(min=2, max=64, help="Entries that are stored at once.")] = 8,
    json_file: Json = None,
) -> None:
    """The store's disk tier against the file system alone: put and get, medians, no engine needed."""
    from blendrag.bench.store import measure, table

    figures = [figure for size in megabytes or [4, 64] for figure in measure(path, size, repeats, group)]
    Console(width=110).print(table(figures))
    if json_file:
        json_file.write_text(json.dumps([figure.to_dict() for figure in figures], indent=1))


@app.command()
def encode(
    model: Model = "smollm2",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks that are encoded at once.")] = 32,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Length of a chunk in tokens.")] = 512,
    path: Annotated[Path | None, typer.Option(help="A folder on the disk that stores are made on.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds for each figure, with new chunks each.")] = 3,
    eager: Annotated[bool, typer.Option(help="Run without compiled model code.")] = False,
    dummy: Annotated[bool, typer.Option(help="Random weights: the model folder needs only its configuration.")] = False,
    batched_tokens: Annotated[int, typer.Option(min=64, help="vLLM's max_num_batched_tokens.")] = 8192,
    json_file: Json = None,
) -> None:
    """Tokens per second of plain prefill, of encoding into RAM and of encoding into a store on disk."""
    from tempfile import TemporaryDirectory

    from blendrag.bench.encode import Figure, measure, table
    from blendrag.config import BlendConfig
    from blendrag.engine import BlendEngine
    from blendrag.models import resolve

    settings: dict[str, Any] = {"load_format": "dummy"} if dummy else {}
    figures: list[Figure] = []
    with TemporaryDirectory(dir=path) as folder:
        for what, store_path in (("encode into RAM", None), ("encode into a store on disk", Path(folder) / "store")):
            with BlendEngine(resolve(model), config=BlendConfig(store_path=store_path, blend="always"),
                             max_model_len=chunk_tokens + 64, max_num_batched_tokens=max(batched_tokens, chunk_tokens),
                             enforce_eager=eager, enable_prefix_caching=False, **settings) as engine:
                figures += measure(engine, what, chunks=chunks, chunk_tokens=chunk_tokens, repeats=repeats,
                                   plain=not figures)
    Console(width=110).print(table(figures, f"{chunks} chunks of {chunk_tokens} tokens, {model}"))
    if json_file:
        json_file.write_text(json.dumps([figure.to_dict() for figure in figures], indent=1))


@app.command()
def plan(
    model: Model = "smollm2",
    chunks: Annotated[int, typer.Option(min=1, help="Stored chunks of a prompt.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Length of a chunk in tokens.")] = 512,
    store: Annotated[Path | None, typer.Option(help="An empty folder: plan with a store on disk, not in RAM.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts for each figure, each with its chunks in a new order.")]
    = 100,
) -> None:
    """Tokenising and planning a prompt of stored chunks: what a request costs before the model, no engine needed."""
    from blendrag.bench.load.measure import load_tokens
    from blendrag.bench.match import machine
    from blendrag.bench.plan import PlanBench, table

    bench = PlanBench(load_tokens(model), chunks, chunk_tokens, store)
    try:
        tokens, figures = bench.measure(repeats)
    finally:
        bench.close()
    console = Console(width=110)
    console.print(table(figures, tokens, chunks))
    console.print(machine(), highlight=False, soft_wrap=True)


@app.command(epilog=_EPILOG, context_settings=_TO_VLLM)
def serve(
    context: typer.Context,
    model: Model = "smollm2",
    http: Http = None,
    plain_http: PlainHttp = None,
    server: Server = False,
    shape: Annotated[Shape, typer.Option(
        help="rag: random documents of a pool in random order. permute: all of them in a new order each time. chat: "
        "conversations with new documents, some seen before.")] = Shape.RAG,
    rate: Annotated[list[float] | None, typer.Option(
        min=1e-6, show_default="0.5", help="Requests a second, Poisson; repeat it for a curve.")] = None,
    in_flight: Annotated[list[int] | None, typer.Option(
        min=1, help="Send the next request as soon as fewer than so many are under way; repeat it for more.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 40,
    documents: Documents = 64,
    zipf: Annotated[float, typer.Option(min=0, help="Document k has popularity k**-ZIPF; 0: all alike.")] = 0.9,
    per_request: Annotated[int, typer.Option(min=1, help="Documents of a request; all of the pool with permute.")] = 8,
    document_tokens: DocumentTokens = 128,
    system_tokens: SystemTokens = 64,
    question_tokens: QuestionTokens = 24,
    output_tokens: OutputTokens = 16,
    users: Annotated[int, typer.Option(min=1, help="chat: conversations that are open at a time.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="chat: a conversation has 1 to so many turns.")] = 8,
    seen: Annotated[float, typer.Option(min=0, max=1, help="chat: share of the documents seen before.")] = 0.43,
    repeated: Annotated[float, typer.Option(
        min=0, max=1, help="chat: share that the conversation itself had before, a part of --seen.")] = 0.21,
    neighbours: Annotated[int, typer.Option(min=0, help="Streams that decode all the time.")] = 0,
    probe_rate: Annotated[float, typer.Option(min=0, help="Short requests a second beside the load.")] = 0,
    goodput: Annotated[list[str] | None, typer.Option(
        metavar="ttft:MS|tpot:MS", show_default="every answer is good",
        help="What a good answer meets; repeat it, or write both in one text.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Store nothing before the load; its traffic does.")] = False,
    data: Data = None,
    settings: Settings = None,
    export: Annotated[Path | None, typer.Option(
        help="Write the prompts to this .jsonl file, for `vllm bench serve --dataset-name custom`.")] = None,
    seed: Seed = 0,
    json_file: Json = None,
    html_file: Html = None,
) -> None:
    """Blending in traffic: one seeded load against vLLM with prefix caching, plain and blended."""
    from blendrag.bench.load.figures import Goal
    from blendrag.bench.load.measure import LoadPlan, measure_load
    from blendrag.bench.load.page import load_page
    from blendrag.bench.load.prompts import Lengths
    from blendrag.bench.load.report import load_tables
    from blendrag.bench.load.run import Load
    from blendrag.bench.load.workload import Workload

    loads = [*(Load(rate=value) for value in rate or ([] if in_flight else [0.5])),
             *(Load(in_flight=value) for value in in_flight or [])]
    workload = Workload(shape, requests, documents, zipf, per_request, users, turns, seen, repeated, seed)
    plan = LoadPlan(workload, Lengths(document_tokens, system_tokens, question_tokens, output_tokens), loads,
                    Goal.parse(goodput or []), neighbours, probe_rate, _texts(data), cold, export)
    target = _target(model, http, plain_http, server, settings, context.args)
    title = f"{model}, {shape}, {requests} requests of {output_tokens} tokens, {_through(target)}"
    outputs = Outputs(json_file, html_file, title)
    figures = outputs.measure(lambda on_progress: measure_load(target, plan, on_progress))
    outputs.publish(figures, load_tables(figures), load_page)


@app.command(epilog=_EPILOG, context_settings=_TO_VLLM)
def turns(
    context: typer.Context,
    model: Model = "smollm2",
    http: Http = None,
    plain_http: PlainHttp = None,
    server: Server = False,
    style: Annotated[list[Style] | None, typer.Option(
        show_default="all three", help="same: the first turn's documents stay. replaced: each turn has its own. "
        "accumulated: each turn adds its own.")] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations of each style.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 4,
    documents: Documents = 64,
    per_turn: Annotated[int, typer.Option(min=1, help="Documents of a turn.")] = 8,
    document_tokens: DocumentTokens = 128,
    system_tokens: SystemTokens = 64,
    question_tokens: QuestionTokens = 24,
    output_tokens: OutputTokens = 16,
    data: Data = None,
    settings: Settings = None,
    seed: Seed = 0,
    json_file: Json = None,
    html_file: Html = None,
) -> None:
    """Conversations, one at a time: the first token of each turn, plain and blended."""
    from blendrag.bench.load.measure import measure_turns
    from blendrag.bench.load.page import turns_page
    from blendrag.bench.load.prompts import Lengths
    from blendrag.bench.load.report import turn_tables
    from blendrag.bench.load.turns import Conversations

    plan = Conversations(conversations, turns, per_turn, documents, seed)
    lengths = Lengths(document_tokens, system_tokens, question_tokens, output_tokens)
    target = _target(model, http, plain_http, server, settings, context.args)
    title = f"{model}, {conversations} conversations of {turns} turns, {_through(target)}"
    outputs = Outputs(json_file, html_file, title)
    figures = outputs.measure(lambda on_progress: measure_turns(
        target, plan, style or list(Style), lengths, _texts(data), on_progress))
    outputs.publish(figures, turn_tables(figures), turns_page)


def _target(model: str, http: str | None, plain_http: str | None, server: bool, settings: Path | None,
            options: list[str]) -> Target:
    if http and (server or options or settings):
        raise ConfigError("--http measures a server that runs already: leave out --server, --settings and engine "
                          f"options ({' '.join(options) or 'none here'})")
    if plain_http and not (http or server):
        raise ConfigError("--plain-http is for servers: add --http URL or --server")
    return Target(model, settings, options, prepare(verbose=False), server, http, plain_http)


def _through(target: Target) -> str:
    if not target.url and not target.serve:
        return "AsyncBlendEngine"
    return "HTTP, plain from a server of its own" if target.plain_url else "HTTP"


def _texts(data: Path | None) -> list[str]:
    """The documents of a data set, each once."""
    if data is None:
        return []
    from blendrag.evaluate import load_questions

    return list(dict.fromkeys(text for question in load_questions(data) for text in question.chunks))


@app.command()
def abuse(
    model: Annotated[str, typer.Option(help="Path or name of a model, or smollm2 for the demo model.")] = "smollm2",
    size: Annotated[int, typer.Option(min=1000, help="Bytes of a body, about.")] = 1_000_000,
    max_model_len: Annotated[int, typer.Option(min=512, help="Longest prompt plus answer, in tokens.")] = 4096,
    step_tokens: Annotated[int, typer.Option(min=64, help="vLLM's max_num_batched_tokens.")] = 1024,
    attempts: Annotated[int, typer.Option(min=1, max=8, help="Of each body; the least times count.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """What one client can take of others' time: expensive bodies against server, scheduler and a decoding neighbour.

    Ends with status 1 where one takes more than 0.2 s beyond plain vLLM.
    """
    from blendrag.bench.abuse import abuses, measure, table
    from blendrag.config import BlendConfig
    from blendrag.engine import BlendEngine
    from blendrag.models import resolve

    with BlendEngine(resolve(model), config=BlendConfig(populate="on_miss"), max_model_len=max_model_len,
                     max_num_batched_tokens=step_tokens, enforce_eager=True) as engine:
        kinds = zip(*(abuses(size, max_model_len // 4, attempt) for attempt in range(attempts)), strict=True)
        figures = [measure(engine, kind) for kind in kinds]
    Console(width=140).print(table(figures))
    if json_file:
        json_file.write_text(json.dumps([figure.to_dict() for figure in figures], indent=1))
    if not all(figure.passed for figure in figures):
        raise typer.Exit(1)
