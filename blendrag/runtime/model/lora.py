"""Keeps LoRA adapters out of our passes.

With `enable_lora` vLLM wraps the model's linear layers: each adds to every row of a forward what the row's adapter
says.  Which adapter that is stands in a mapping that vLLM makes for the rows of its own batch, just before our pass.
Our rows are others, and all of them belong to requests without an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_adapters(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Within it a forward of `rows` rows is the base model's; afterwards vLLM's mapping is what it was."""
    manager: Any = getattr(model, "lora_manager", None)
    if manager is None:
        yield
        return
    from vllm.lora.layers import LoRAMapping

    before = manager._last_mapping
    manager.set_adapter_mapping(LoRAMapping((0,) * rows, (0,), is_prefill=True))
    try:
        yield
    finally:
        # Between steps an adapter of the last batch may be gone; vLLM makes a new mapping before it next needs one.
        if before is not None and {0, *manager.lora_index_to_id}.issuperset(before.index_mapping):
            manager.set_adapter_mapping(before)
