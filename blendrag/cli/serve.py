"""`blendrag serve`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag.cli.environment import prepare
from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag.config import BlendConfig

EPILOG = ("Any option of `vllm serve` may follow, such as --port 8001, --max-model-len 8192 or --api-key KEY; "
          "`blendrag serve --vllm-help` lists them all.")


def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(
        metavar="MODEL", show_default=False, help="smollm2, or a folder or hub name that vLLM loads.")] = None,
    store: Annotated[Path | None, typer.Option(
        help="The folder of the chunk store (BlendConfig.store_path); chunks last as long as the server without it.",
    )] = None,
    namespace: Annotated[str | None, typer.Option(help="Chunks are shared within a namespace only.")] = None,
    populate: Annotated[str | None, typer.Option(
        show_default="on_miss", help="on_miss: documents that requests name and that are not stored are encoded after "
        "their request's first token. never: only stored ones are reused.")] = None,
    policy: Annotated[str | None, typer.Option(
        show_default="query", help="Which tokens are recomputed: exact, full, none, first, cacheblend, query.")] = None,
    ratio: Annotated[float | None, typer.Option(
        show_default="the policy's", help="Share of the reused tokens to recompute.")] = None,
    quality_guard: Annotated[str | None, typer.Option(
        metavar="JSON", show_default="none", help="Audit a share of the requests, and let blending give way where "
        """answers suffer: '{"share": 0.02, "max_kl": 0.3}', or '{}' for the defaults.""")] = None,
    ram_bytes: Annotated[str | None, typer.Option(
        show_default="4GiB", help="Budget of the host-RAM tier, such as 16GiB.")] = None,
    disk_bytes: Annotated[str | None, typer.Option(
        show_default="half of what is free", help="Budget of the disk tier.")] = None,
    gpu_bytes: Annotated[str | None, typer.Option(
        show_default="half of what vLLM leaves free, 8 GiB at most", help="Budget of the tier on the GPU.")] = None,
    tenants: Annotated[Path | None, typer.Option(
        metavar="FILE", help="A YAML file of tenants, each with API keys, a namespace of its own, and limits; requests "
        "without one of the keys are refused.")] = None,
    client_policy: Annotated[bool | None, typer.Option(
        "--client-policy/--no-client-policy", show_default="allowed",
        help="Whether a request may choose its policy and ratio.")] = None,
    statistics: Annotated[str | None, typer.Option(
        show_default="chunks", help="What answers say of reuse: chunks, totals or none.")] = None,
    settings: Annotated[Path | None, typer.Option(
        help="A YAML file of these and all other settings of BlendConfig; options win over it.")] = None,
    vllm_help: Annotated[bool, typer.Option("--vllm-help", help="List the options of `vllm serve` and exit.")] = False,
) -> None:
    """Start an OpenAI-compatible server that reuses the KV of documents: `vllm serve` with blending in it.

    Each setting may also come from a BLENDRAG_* variable.

    Clients need no change. A request may name its documents in a field `documents`, a list of texts, and its answer
    says what was reused.
    """
    engine_args = prepare(verbose=True)
    if vllm_help:
        from blendrag.runtime.serving import serve as run

        run(["--help=all"])
    if model is None or model.startswith("-"):
        raise ConfigError("name the model first: blendrag serve MODEL --port 8001")
    given = {"store_path": store, "namespace": namespace, "populate": populate, "policy": policy, "ratio": ratio,
             "quality_guard": quality_guard,
             "ram_bytes": ram_bytes, "disk_bytes": disk_bytes, "gpu_bytes": gpu_bytes, "tenants": tenants,
             "client_policy": client_policy, "statistics": statistics}
    given = {name: value for name, value in given.items() if value is not None}
    run_serve(model, settings, given, context.args, engine_args)


def run_serve(model: str, settings: Path | None, given: dict[str, Any], options: list[str],
              engine_args: dict[str, Any]) -> None:
    """Runs the server until it is told to end.

    Args:
        settings: a YAML file of `BlendConfig`'s fields, or None.
        given: fields that win over it.
        options: of `vllm serve`.

    Raises:
        BlendError: settings that make no sense, a model or store that is not there.
        SystemExit: the server's exit status.
    """
    from blendrag.config import BlendConfig
    from blendrag.models import engine_arguments, resolve

    config = BlendConfig.from_yaml(settings, **given) if settings else BlendConfig(**given)
    if "populate" not in config.model_fields_set:  # otherwise a server that nobody filled would never reuse anything
        config = config.model_copy(update={"populate": "on_miss"})
    from blendrag.runtime.engine.start import check_store
    from blendrag.runtime.serving import arguments
    from blendrag.runtime.serving import serve as run
    from blendrag.tenants import load_tenants

    check_store(config)
    if config.tenants is not None:
        load_tenants(config.tenants)  # complains before a model is loaded
    config = _with_disk_limit(config)
    suited = engine_arguments(model) | engine_args
    folder = resolve(model)
    if folder != model:
        suited["served_model_name"] = model  # not the folder that we put it in
    try:
        run(arguments(folder, config, options, **suited))
    except SystemExit as end:
        if end.code == 2:  # argparse has said what is wrong
            typer.echo("`blendrag serve --help` lists blendrag's options, `blendrag serve --vllm-help` those of vLLM",
                       err=True)
        raise


def _with_disk_limit(config: BlendConfig) -> BlendConfig:
    """A store that clients fill must not fill the disk: without a budget it may grow by half of what is free."""
    if config.store_path is None or "disk_bytes" in config.model_fields_set:
        return config
    used = sum(file.stat().st_size for file in config.store_path.rglob("*") if file.is_file())
    limit = used + shutil.disk_usage(config.store_path).free // 2
    typer.echo(f"the store may take {limit / 2**30:.1f} GiB of {config.store_path}: --disk-bytes sets another limit",
               err=True)
    return config.model_copy(update={"disk_bytes": limit})
