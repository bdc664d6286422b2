"""Fixtures of the whole repository: one real engine at a time, started as seldom as possible."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker's engine has a core to itself
    _core = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % (os.cpu_count() or 1)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(_core)
    os.environ["OMP_NUM_THREADS"] = "1"  # vLLM binds an engine in this process to no core: two threads each would spin
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is first imported
for _name in [name for name in os.environ if name.startswith("BLENDRAG_") and name != "BLENDRAG_MODELS"]:
    del os.environ[_name]
os.environ["BLENDRAG_BLEND"] = "always"  # prompts here are too short to gain anything, and nothing is to be measured

LONGEST = ("test_serve.py", "test_conformance.py", "test_process.py", "test_async.py", "test_tensor_parallel.py")
"""Files that take most of a minute or more, the longest first."""

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_logprobs": -1,
    "kv_cache_memory_bytes": 2**30, "logits_processors": ["blendrag.runtime.forcing:ForcedTokens"]}
"""Engine arguments of the engines that most tests share; answers can be forced, which makes no other difference."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often random cases are tried; `make test-hard` asks for many more."""
    parser.addoption("--soak", type=int, default=500, help="random requests that test_soak.py sends (500)")
    parser.addoption("--mutated-entries", type=int, default=300, help="damaged files of test_store_fuzz.py (300)")
    parser.addoption("--mutated-manifests", type=int, default=40, help="damaged manifests of test_store_fuzz.py (40)")
    parser.addoption("--kills", type=int, default=5, help="processes that test_store_kills.py kills, twice (5)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, then those that share an engine beside each other, and those without one last.

    Two workers take one file each, and have short ones to share at the end.
    """
    fixtures: dict[Path, set[str]] = {}
    for item in items:
        fixtures.setdefault(item.path, set()).update(getattr(item, "fixturenames", ()))

    def place(item: pytest.Item) -> int:
        if item.path.name in LONGEST:
            return LONGEST.index(item.path.name)
        uses = fixtures[item.path]
        order = ("smollm2_engine" in uses, "engine_pool" in uses and "shallow" not in uses, "shallow" in uses, True)
        return len(LONGEST) + order.index(True)

    items.sort(key=place)


_freeze = gc.freeze


def _set_aside() -> None:
    """Lets no later collection look at what has been imported so far.

    vLLM collects garbage three times in a start and four times in an end, and each would take most of a second.
    """
    gc.collect()
    _freeze()


class EnginePool:
    """Keeps one engine running; asking for another kind closes it first."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._engine: Any = None

    def get(self, model: str | Path, **settings: Any) -> Any:
        """A running `BlendEngine(model, **settings)`: the one that runs, where it is the same."""
        from blendrag import BlendEngine

        key = repr((str(model), sorted(settings.items(), key=lambda item: item[0])))
        if key != self._key:
            self.close()
            engine = BlendEngine(str(model), **settings)
            engine._start()
            self._engine, self._key = engine, key
        return self._engine

    def close(self) -> None:
        """Closes what runs."""
        if self._engine is None:
            return
        self._engine.close()
        self._engine = self._key = None
        _set_aside()  # what the start of an engine has imported


@pytest.fixture(scope="session")
def engine_pool() -> Iterator[EnginePool]:
    """The pool of this test session."""
    importlib.import_module("vllm.v1.engine.llm_engine")
    _set_aside()
    pool = EnginePool()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):  # vLLM would set aside its engines as well, and bring back all of it
            patch.setattr(gc, name, lambda: None)
        yield pool
        pool.close()
    gc.unfreeze()  # for the interpreter's own end


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched where it is not there yet."""
    from blendrag.models import fetch

    return fetch("smollm2")


@pytest.fixture(scope="session")
def shallow(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of SmolLM2 with eight of its thirty layers, for tests that do not ask what it knows."""
    from tests.shallow import make_shallow

    return make_shallow(smollm2, tmp_path_factory.mktemp("shallow") / "model")


@pytest.fixture(scope="module")
def emptied() -> list[Any]:
    """The shared engine, once this module has emptied its store."""
    return []


@pytest.fixture
def engine(engine_pool: EnginePool, shallow: Path, emptied: list[Any]) -> Any:
    """The shallow SmolLM2 in float32, with everything that vLLM does by default but for compiling.

    A module finds nothing of what those before it have stored.
    """
    engine = engine_pool.get(shallow, **SETTINGS)
    if engine not in emptied:
        engine.store.clear()
        engine.reset_prefix_cache()
        emptied.append(engine)
    return engine


@pytest.fixture
def smollm2_engine(engine_pool: EnginePool, smollm2: Path) -> Any:
    """The same with all layers, for tests of what is lost and saved by blending."""
    return engine_pool.get(smollm2, **SETTINGS)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors cost more to share between threads than to compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def own_process() -> Callable[..., tuple[str, str]]:
    """Runs a script in a Python of its own, from a file, which must end with an exit code.

    Returns what it printed, and what it wrote to standard error.
    """
    import subprocess
    import sys
    import tempfile

    def run(script: str, exit_code: int = 0) -> tuple[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "script.py")
            path.write_text(script)
            done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == exit_code, done.stderr[-3000:]
        return done.stdout, done.stderr

    return run


@pytest.fixture
def example(engine_pool: EnginePool, monkeypatch: pytest.MonkeyPatch,
            capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program of examples/ with its arguments and returns what it printed.

    In this process, where everything that it imports has been imported already, with an engine of its own.
    """
    import runpy
    import sys

    def run(name: str, *arguments: str) -> str:
        engine_pool.close()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; unasked, it is most of the machine, full of zeros
        capsys.readouterr()
        runpy.run_path(str(Path(__file__).parent / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run
