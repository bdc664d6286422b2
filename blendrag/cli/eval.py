"""`blendrag eval`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blendrag.cli.environment import prepare
from blendrag.errors import BlendError, ConfigError
from blendrag.files import check_writable, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blendrag.config import BlendConfig
    from blendrag.evaluate import Evaluation, Question, Setting
    from blendrag.evaluate.summary import Summary

EPILOG = ("Any engine option of vLLM may follow, such as --max-model-len 8192 or --dtype float32; "
          "`blendrag serve --vllm-help` lists them all.")

_INTERRUPTED = 130


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(
        metavar="MODEL", show_default=False, help="smollm2, or a folder or hub name that vLLM loads.")],
    data: Annotated[Path, typer.Option(
        help="Questions and what was retrieved for each: a JSON list, or JSON lines, of {question, ctxs, answers}.")],
    policies: Annotated[str, typer.Option(
        help="Policies to compare with a full prefill, separated by commas, each with settings where wanted "
        "(query:reach=0). default is what an engine uses unasked.")] = "default,cacheblend,first,none",
    ratio: Annotated[list[float] | None, typer.Option(
        min=0, max=1, show_default="the policy's", help="Share of the reused tokens to recompute; repeat it for more. "
        "default keeps its own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask the first so many questions only.")] = None,
    shuffle: Annotated[int | None, typer.Option(
        metavar="SEED", help="Put the documents of each question into another order, drawn with this seed.")] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    turns: Annotated[int | None, typer.Option(
        min=2, help="Hold conversations of so many turns, and measure the later ones continued and blended anew. They "
        "are the follow_ups of the data, or the questions behind each.")] = None,
    settings: Annotated[Path | None, typer.Option(
        help="A YAML file of BlendConfig's settings, as `blendrag serve` takes it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option(
        "--html", help="Write a report with plots, every answer and a blend map to this file.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log lines of vLLM and its libraries.")] = False,
) -> None:
    """Measure on your own questions what blending saves, and what it costs in quality."""
    if model.startswith("-"):
        raise ConfigError("name the model first: blendrag eval MODEL --data FILE.json")
    suited = prepare(verbose)
    from blendrag.config import BlendConfig
    from blendrag.evaluate import conversations_of, load_questions, settings_of, shuffled
    from blendrag.runtime.engine.options import engine_options

    config = BlendConfig.from_yaml(settings) if settings else BlendConfig()
    chosen = settings_of(policies, ratio or [], config)
    questions, dataset = load_questions(data, limit), str(data)
    if turns is not None:
        questions, dataset = conversations_of(questions, turns), f"{dataset}, in conversations of {turns} turns"
    if shuffle is not None:
        questions, dataset = shuffled(questions, shuffle), f"{dataset}, shuffled with seed {shuffle}"
    if json_file is not None and json_file == html_file:
        raise ConfigError(f"--json and --html both name {json_file}: give each a file of its own")
    for file in filter(None, (json_file, html_file)):
        check_writable(file)
    engine_args = suited | engine_options(context.args)
    found = run_eval(model, dataset, questions, chosen, config, answer_tokens, json_file, html_file, Console(),
                     engine_args, turns is not None)
    if found.interrupted or found.failures:
        raise typer.Exit(_INTERRUPTED if found.interrupted else 1)


def run_eval(model: str, dataset: str, questions: list[Question], settings: list[Setting], config: BlendConfig,
             answer_tokens: int, json_file: Path | None, html_file: Path | None, console: Console,
             engine_args: dict[str, Any], turns: bool = False) -> Evaluation:
    """Measures, shows the table and writes the files, also after Ctrl-C and where questions failed.

    Args:
        turns: measure the follow-ups of each question, too.

    Raises:
        BlendError: a model that cannot be loaded, a file that cannot be written, or not one question measured.
    """
    from blendrag.engine import BlendEngine
    from blendrag.evaluate import engine_arguments as needed
    from blendrag.evaluate import evaluate, summarise, summarise_turns
    from blendrag.evaluate.blendmap import map_prompt
    from blendrag.evaluate.html import report
    from blendrag.evaluate.table import show
    from blendrag.evaluate.turn_table import show_turns
    from blendrag.machine import device
    from blendrag.models import engine_arguments, resolve
    from blendrag.profile import default_policy
    from blendrag.terminal import progress_bar

    args = engine_arguments(model) | engine_args
    # A guard would audit what is measured, and could turn it off meanwhile.
    # What is encoded for the measurement stays out of the user's store.  Policies are compared, so all are blended; and
    # what continuing a conversation costs is asked, not whether.
    measured_with = config.model_copy(update={"store_path": None, "quality_guard": None, "blend": "always",
                                              "conversations": "continue"})
    with BlendEngine(resolve(model), config=measured_with, **(args | needed(args))) as engine:
        with console.status("starting vLLM"):
            used, _ = default_policy(config, engine.fingerprint)
        with progress_bar(console, "questions") as on_progress:
            found = evaluate(engine, questions, settings, default=used, answer_tokens=answer_tokens,
                             turns=turns, on_progress=on_progress)
        summaries = summarise(found)
        title = f"{model} on {dataset}, {device()}"
        if found.questions:
            show(console, found, summaries, title)
            show_turns(console, summarise_turns(found))
        try:
            if json_file:
                told = {"model": model, "dataset": dataset} | _told(found, summaries)
                write(json_file, json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        finally:  # a file that fails takes no other with it
            if html_file and found.questions:
                mapped = None
                with suppress(BlendError):  # an engine that died leaves a report without a map
                    mapped = map_prompt(engine, found)
                write(html_file, report(title, found, summaries, mapped))
    if not found.questions:
        reason = found.failures[0].reason if found.failures else "interrupted"
        raise BlendError(f"not one question could be measured: {reason}")
    return found


def _told(found: Evaluation, summaries: Sequence[Summary]) -> dict[str, Any]:
    """What the JSON file says of a measurement."""
    from blendrag.evaluate.turn_summary import summarise_turns, transcripts

    told: dict[str, Any] = {"policies": [summary.to_dict() for summary in summaries]}
    if turns := [summary.to_dict() for turn in summarise_turns(found) for summary in turn]:
        told |= {"turns": turns, "conversations": transcripts(found)}
    if found.failures:
        told["left_out"] = [{"line": f.question.line, "reason": f.reason} for f in found.failures]
    if found.interrupted:
        told["interrupted"] = True
    return told
