"""Makes an int8 checkpoint, in the format of compressed-tensors, of a small model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_CONFIG = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"],
                                  "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                                  "input_activations": _INT8 | {"strategy": "token", "dynamic": True}}},
}


def to_int8(folder: Path) -> None:
    """Rounds all layers' weights to int8, with a scale for each output, and says so in config.json."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _CONFIG}))
