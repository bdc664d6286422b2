"""What times were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's name and how many cores it has."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"


def device() -> str:
    """What a model runs on: the GPU, or the processor."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else processor()
