"""`blendrag calibrate`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from blendrag.cli.environment import prepare
from blendrag.errors import ConfigError
from blendrag.files import check_writable, write

if TYPE_CHECKING:
    from blendrag.calibrate import Calibration, Target
    from blendrag.calibrate.sources import Generated, Given
    from blendrag.config import BlendConfig

EPILOG = ("Any engine option of vLLM may follow, such as --max-model-len 8192 or --dtype float32; give those that the "
          "engine will run with.")

_MAX_KL = 0.1
_NOT_MET = 3
"""The exit status where no policy is good enough; errors have 1."""


def calibrate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(
        metavar="MODEL", show_default=False, help="smollm2, or a folder or hub name that vLLM loads.")],
    store: Annotated[Path, typer.Option(
        help="The folder of the chunk store (BlendConfig.store_path), beside which engines look for the profile.")],
    data: Annotated[Path | None, typer.Option(
        help="Questions and what was retrieved for each, as `blendrag eval` takes them.")] = None,
    docs: Annotated[Path | None, typer.Option(
        help="Instead of --data: documents, about which the model writes the questions.")] = None,
    max_kl: Annotated[float | None, typer.Option(
        show_default="0.1, if no other limit is given", help="Mean KL of the first token's distribution from a full "
        "prefill's, at most; in nats.")] = None,
    min_top1: Annotated[float | None, typer.Option(
        help="Share of questions on which both expect the same first token, at least.")] = None,
    min_f1: Annotated[float | None, typer.Option(
        help="Share of a full prefill's F1, at least: 0.99. Needs answers in the data.")] = None,
    questions: Annotated[int, typer.Option(min=10, help="Ask at most so many.")] = 60,
    top_k: Annotated[int, typer.Option(min=2, help="With --docs: chunks in a prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="With --docs: most tokens of a chunk.")] = 256,
    settings: Annotated[Path | None, typer.Option(
        help="A YAML file of BlendConfig's settings, as `blendrag serve` takes it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the profile to this file, too.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log lines of vLLM and its libraries.")] = False,
) -> None:
    """Find the cheapest policy that is good enough on your questions, and let engines use it.

    The profile is for this model as it runs here (its weights, dtype, ranks); engines with the same store find it and
    use it for requests that name no policy. Where no policy is good enough it keeps them from blending, and the exit
    status is 3.
    """
    if model.startswith("-"):
        raise ConfigError("name the model first: blendrag calibrate MODEL --store FOLDER --data FILE.json")
    if (data is None) == (docs is None):
        raise ConfigError("give either --data FILE.json with questions, or --docs FOLDER with documents")
    suited = prepare(verbose)
    from blendrag.calibrate import Target
    from blendrag.calibrate.sources import Generated, Given
    from blendrag.config import BlendConfig
    from blendrag.runtime.engine.options import engine_options

    if max_kl is None and min_top1 is None and min_f1 is None:
        max_kl = _MAX_KL
    config = BlendConfig.from_yaml(settings) if settings else BlendConfig()
    console, target = Console(), Target(max_kl, min_top1, min_f1)
    source: Given | Generated
    if docs is not None:
        if min_f1 is not None:
            raise ConfigError("min_f1 needs right answers, which generated questions have not: give --data, or max_kl")
        source = Generated(docs, questions, top_k, chunk_tokens, console)
    else:
        assert data is not None
        source = Given(data, questions, target)
    if json_file:
        check_writable(json_file)
    found = run_calibrate(model, store.expanduser(), source, target, config, console,
                          suited | engine_options(context.args), json_file)
    if found.chosen is None:
        raise typer.Exit(_NOT_MET)


def run_calibrate(model: str, store: Path, source: Given | Generated, target: Target, config: BlendConfig,
                  console: Console, engine_args: dict[str, Any], json_file: Path | None) -> Calibration:
    """Measures, shows the curve and writes the profile.

    Raises:
        BlendError: a model that cannot be loaded, a store that cannot be written, too few questions.
    """
    from blendrag.calibrate import calibrate as search
    from blendrag.calibrate.advice import advise
    from blendrag.calibrate.report import show
    from blendrag.engine import BlendEngine
    from blendrag.evaluate import engine_arguments as needed
    from blendrag.models import engine_arguments, resolve
    from blendrag.profile import Profile, make_room
    from blendrag.runtime.engine.start import check_store
    from blendrag.terminal import progress_bars

    check_store(config.model_copy(update={"store_path": store}))
    make_room(store)
    # What is encoded for the measurement stays out of the store.
    measured_with = config.model_copy(update={"store_path": None, "quality_guard": None, "blend": "always"})
    args = engine_arguments(model) | engine_args
    with BlendEngine(resolve(model), config=measured_with, **(args | needed(args))) as engine:
        with console.status("starting vLLM"):
            fingerprint = engine.fingerprint
        asked = source.questions(engine)
        with progress_bars(console) as on_progress:
            found = search(engine, asked, target, on_progress=on_progress)
    found.repeats += source.repeats
    advice, chosen = advise(found), found.chosen
    show(console, found, advice)
    profile = Profile(
        fingerprint, model, chosen.setting.policy if chosen else None, target.to_dict(), len(found.questions),
        datetime.now(UTC).isoformat(timespec="seconds"), config.sparse_attention, chosen.to_dict() if chosen else {},
        [p.to_dict() for p in found.tuning], advice)
    if json_file:
        write(json_file, json.dumps(profile.to_dict(), indent=2, ensure_ascii=False) + "\n")
    path = profile.save(store)
    console.print()
    console.print(Text(f"Written to {path}; engines with store_path={store} use it from their next start on."),
                  soft_wrap=True)
    if not config.uses_profile:
        console.print(Text("But not with these settings, from a file or BLENDRAG_* variables: they name a policy, or "
                           "set profile to false, and win.", style="yellow"), soft_wrap=True)
    return found
