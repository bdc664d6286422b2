"""Gives back what a vLLM engine in this process held."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def free_memory() -> None:
    """Frees what vLLM keeps in globals, and what it froze out of the garbage collector's sight."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.unfreeze()
    cleanup_dist_env_and_memory()
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed weights would stay with the process
