"""Moves stored keys to new positions with the model's own rotary table.

A key at position p is R(p) k.  Stored keys are unrotated (k); placing one means applying R(p) once.
R comes from the cos/sin table of the very module that rotates fresh keys, so every scaling that is
a fixed table (linear, llama3, YaRN with its magnitude, LongRoPE as vLLM runs it, per-layer bases, partial
dimensions) is right by construction.  All arithmetic is float32.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch

from blendrag.errors import ModelError

_REMEDY = "so stored keys cannot be moved: use a model with default, linear, llama3, YaRN or long rope"


class Rotation:
    """The rotary embedding of one or more layers."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        """
        Args:
            module: a vLLM rotary embedding with a table of cosines and sines, [positions, rotary dim].
            dtype: of the keys it will be given.

        Raises:
            ModelError: the module does something a fixed table does not describe.
        """
        self.name = type(module).__name__
        table = _table(module)
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            raise ModelError(f"the rotary embedding {self.name} has no fixed cos/sin table, {_REMEDY}")
        size = int(getattr(module, "head_size", table.shape[1]))
        try:
            _theirs(module, torch.zeros(2, 1, size, device=table.device, dtype=dtype), torch.arange(2))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"the rotary embedding {self.name} is called otherwise ({error}), {_REMEDY}") from error
        table = _table(module)  # vLLM casts it to the keys' dtype at the first use, and so do we
        self.neox = bool(getattr(module, "is_neox_style", True))
        half = table.shape[1] // 2
        self.cos, self.sin = table[:, :half].float().contiguous(), table[:, half:].float().contiguous()
        self._check(module, size, dtype)

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """R(p) k.  Keys [tokens, heads, head size], positions int64 [tokens]; the keys' dtype is kept."""
        return self.apply(keys, *self.angles(positions))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at positions, [tokens, half of the rotary dimensions], float32."""
        return self.cos[positions], self.sin[positions]

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The k of R(p) k.  The table may carry a magnitude (YaRN) and rounding, so it is divided out."""
        cos, sin = self.cos[positions], self.sin[positions]
        norm = cos * cos + sin * sin
        return self.apply(keys, cos / norm, -sin / norm)

    def apply(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turns each pair by the given `angles`."""
        half = cos.shape[-1]
        cos, sin = cos[:, None], sin[:, None]
        out = torch.empty_like(keys)
        out[..., 2 * half :] = keys[..., 2 * half :]
        first, second = self._pairs(keys, half)
        x, y = first.float(), second.float()
        new_first, new_second = self._pairs(out, half)
        new_first.copy_((x * cos).addcmul_(y, sin, value=-1))
        new_second.copy_((y * cos).addcmul_(x, sin))
        return out

    def _pairs(self, keys: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two members of each rotated pair: halves of the rotary dimensions (NeoX) or neighbours (GPT-J)."""
        if self.neox:
            return keys[..., :half], keys[..., half : 2 * half]
        return keys[..., : 2 * half : 2], keys[..., 1 : 2 * half : 2]

    def _check(self, module: torch.nn.Module, size: int, dtype: torch.dtype) -> None:
        """Compares with the module itself, so that an embedding of another kind cannot slip through."""
        last = self.cos.shape[0] - 1
        positions = torch.tensor([0, 1, last // 3, last // 2, last])
        keys = torch.randn(len(positions), 1, size, generator=torch.Generator().manual_seed(0))
        keys = keys.to(self.cos.device, dtype)
        tolerance = 1e-3 if dtype == torch.float32 else 0.06
        close = partial(torch.allclose, atol=tolerance, rtol=tolerance / 4)
        together, alone = _theirs(module, keys, positions), _theirs(module, keys[1:2], positions[1:2])
        if not close(together[1:2], alone):
            raise ModelError(f"the rotary embedding {self.name} depends on the length of the sequence, {_REMEDY}")
        ours = self.rotate(keys, positions.to(keys.device)).float()
        if not close(ours, together):
            raise ModelError(f"the rotary embedding {self.name} does more than a cos/sin table says, {_REMEDY}")


def _table(module: torch.nn.Module) -> Any:
    """The module's cosines and sines; None where it has none."""
    if isinstance(both := getattr(module, "long_short_cos_sin_cache", None), torch.Tensor):
        # LongRoPE: vLLM settles for one of two tables when it starts, the long one where max_model_len needs it.
        short: Any = getattr(module, "original_max_position_embeddings", 0)
        return both[short:] if getattr(module, "use_long_rope", False) else both[:short]
    return getattr(module, "cos_sin_cache", None)


def _theirs(module: torch.nn.Module, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The module's own rotation of keys, as float32."""
    flat = keys.reshape(len(keys), -1)
    rotated = module(positions.to(keys.device), flat.clone(), flat.clone())[1]
    return rotated.reshape(keys.shape).float()  # type: ignore[no-any-return]


class TransformersRotation(Rotation):
    """The rotary embedding of a model that vLLM runs through transformers: one module beside the layers.

    It knows the angles and not which dimensions make a pair, which is the attention layers' business.
    """

    def __init__(self, module: torch.nn.Module, positions: int, dtype: torch.dtype, *, neox: bool = True) -> None:
        """
        Args:
            module: a rotary embedding of transformers, called with hidden states and position ids.
            positions: the table's length.
            neox: halves make pairs; neighbours if False.

        Raises:
            ModelError: the module is no fixed table.
        """
        self.name = type(module).__name__
        self.neox = neox
        kind = str(getattr(module, "rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            raise ModelError(f"the rotary embedding {self.name} depends on the length of the sequence, {_REMEDY}")
        device = next(module.buffers()).device
        try:
            cos, sin = module(torch.zeros(1, dtype=dtype, device=device), torch.arange(positions, device=device)[None])
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"the rotary embedding {self.name} is called otherwise ({error}), {_REMEDY}") from error
        half = cos.shape[-1] // 2
        self.cos, self.sin = (table[0, :, :half].float().contiguous() for table in (cos, sin))

    def paired_otherwise(self) -> TransformersRotation:
        """The same angles, for the other pairs."""
        other = copy(self)
        other.neox = not self.neox
        return other


class NoRotation:
    """A layer without positions (NoPE): keys stay as they are."""

    name = "none"

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys
