"""What a command does before it loads vLLM: quiet logs, and settings that suit the machine."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from typing import Any

_SILENCE = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def prepare(verbose: bool) -> dict[str, Any]:
    """Must run before torch, vLLM and transformers are imported; variables that the user has set stay.

    Args:
        verbose: leave log lines and progress bars as the libraries have them.

    Returns:
        Engine arguments that belong to it.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    engine_args: dict[str, Any] = {}
    spaces = " " in sys.prefix
    if spaces:
        # vLLM would put PyTorch's libgomp there, by its path: with a space in it every subprocess complains.
        os.environ.setdefault("LD_PRELOAD", "libgomp.so.1")
    if not shutil.which("nvidia-smi") and (spaces or not shutil.which(os.environ.get("CXX", "g++"))):
        # On a CPU, PyTorch compiles models with the C++ compiler, and does not quote its own headers' path.
        engine_args["enforce_eager"] = True
    if not verbose:
        _hush()
        engine_args["use_tqdm_on_load"] = False
    return engine_args


def _hush() -> None:
    for name, value in _SILENCE.items():
        os.environ.setdefault(name, value)
    from blendrag.documents import DocumentWarning  # loads torch, which reads a variable of its own

    # Before vLLM has set its own logging up, and where libraries ignore the variables.
    for name in ("vllm", "pypdf", "torch", "transformers", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", DocumentWarning)
