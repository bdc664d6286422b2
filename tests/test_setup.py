"""The set-up helper, without setting anything up."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    """scripts/bootstrap.py as a module."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts/bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_broken_names_what_is_installed_but_does_not_import(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "crashes.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "works.py").write_text("")
    names = ("raises", "crashes", "works", "absent")
    found = bootstrap.broken(names, Path(sys.executable), {"PYTHONPATH": str(tmp_path)})
    assert found == ["raises", "crashes"]


def test_no_companion_of_torch_is_broken_here(bootstrap: ModuleType) -> None:
    assert bootstrap.broken(bootstrap.TORCH_COMPANIONS, Path(sys.executable)) == []


@pytest.mark.parametrize(("requirement", "public"), [
    ('torch==2.13.0+cpu; platform_machine == "x86_64"', 'torch==2.13.0; platform_machine == "x86_64"'),
    ("torch==2.13.0+cpu", "torch==2.13.0"),
    ("transformers<5.20.0,>=5.16.1", "transformers<5.20.0,>=5.16.1"),
    ("mistral_common[image]>=1.11.6", "mistral_common[image]>=1.11.6"),
])
def test_public_drops_the_local_version(bootstrap: ModuleType, requirement: str, public: str) -> None:
    assert bootstrap.public(requirement) == public


def test_every_integration_is_installed(bootstrap: ModuleType) -> None:
    arguments = bootstrap.editables()
    assert arguments[:2] == ["-e", ".[demo,dev]"]
    folders = {f"./integrations/{path.parent.name}[test]" for path in ROOT.glob("integrations/*/pyproject.toml")}
    assert set(arguments[3::2]) == folders


def test_fingerprint_depends_on_the_machine(bootstrap: ModuleType) -> None:
    assert bootstrap.fingerprint(gpu=True) != bootstrap.fingerprint(gpu=False)
    assert bootstrap.fingerprint(gpu=False) == bootstrap.fingerprint(gpu=False)


@pytest.mark.parametrize(("python", "says"), [
    ("no-such-python", "There is no no-such-python: install Python 3.11 or newer"),
    ("old-python", "Python 3.9.2 is too old: blendrag needs 3.11 or newer"),
])
def test_make_names_a_missing_or_old_python(tmp_path: Path, python: str, says: str) -> None:
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    name = str(old) if python == "old-python" else python
    command = ["make", "-C", str(ROOT), "setup", f"PYTHON={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert says in done.stderr
