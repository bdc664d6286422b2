"""vLLM's engine options, as they are typed on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def engine_options(options: Sequence[str]) -> dict[str, Any]:
    """Engine arguments from `--max-model-len 8192 --dtype=float32` and the like; only those that were given.

    Raises:
        SystemExit: an unknown option or a value that makes no sense; the parser has said so.
    """
    if not options:
        return {}
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="blendrag", add_help=False))
    usual = vars(parser.parse_args([]))
    return {name: value for name, value in vars(parser.parse_args(list(options))).items() if value != usual[name]}
