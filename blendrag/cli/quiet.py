"""Keeps the log lines and progress bars of vLLM and its libraries away from what a command shows."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

_SILENCE = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def set_up_logging(verbose: bool) -> dict[str, Any]:
    """Must run before vLLM and transformers are imported; variables that the user has set stay.

    Returns:
        Engine arguments that belong to it.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if verbose:
        return {}
    for name, value in _SILENCE.items():
        os.environ.setdefault(name, value)
    from blendrag.documents import DocumentWarning  # loads torch, which reads a variable of its own

    # Before vLLM has set its own logging up, and where libraries ignore the variables.
    for name in ("vllm", "pypdf", "torch", "transformers", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", DocumentWarning)
    return {"use_tqdm_on_load": False}
