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
    """The rotary embedding of one or more layers.

    Attributes:
        name: the class of the module it is taken from.
        neox: halves of the rotary dimensions make pairs; neighbours if False.
        start: the first rotary dimension of a head.
        cos, sin: float32 [positions, half of the rotary dimensions].
    """

    start = 0

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

    @property
    def dimensions(self) -> int:
        """Rotary dimensions of a head."""
        return 2 * int(self.cos.shape[1])

    def variants(self, head_size: int) -> list[Rotation]:
        """Other ways in which a layer with heads of that size may apply the same angles."""
        return self._at_the_end(head_size)

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
        for rest in (slice(0, self.start), slice(self.start + 2 * half, None)):
            out[..., rest] = keys[..., rest]
        first, second = self._pairs(keys, half)
        x, y = first.float(), second.float()
        new_first, new_second = self._pairs(out, half)
        new_first.copy_((x * cos).addcmul_(y, sin, value=-1))
        new_second.copy_((y * cos).addcmul_(x, sin))
        return out

    def _pairs(self, keys: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two members of each rotated pair: halves of the rotary dimensions (NeoX) or neighbours (GPT-J)."""
        rotary = keys[..., self.start : self.start + 2 * half]
        if self.neox:
            return rotary[..., :half], rotary[..., half:]
        return rotary[..., ::2], rotary[..., 1::2]

    def _at_the_end(self, head_size: int) -> list[Rotation]:
        """The same for the last dimensions of a head, where it has more than the rotary ones (MiniCPM 3)."""
        if self.dimensions == head_size:
            return []
        last = copy(self)
        last.start = head_size - self.dimensions
        return [last]

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

    It knows the angles.  Which dimensions make a pair, and which way round they turn, is up to the attention layers.
    """

    def __init__(self, module: torch.nn.Module, positions: int, dtype: torch.dtype,
                 layer_type: str | None = None) -> None:
        """
        Args:
            module: a rotary embedding of transformers, called with hidden states and position ids.
            positions: the table's length.
            layer_type: of the layers that it rotates, for modules with angles of their own for each type.

        Raises:
            ModelError: the module is no fixed table.
        """
        self.name = type(module).__name__
        kinds: Any = getattr(module, "rope_type", "default")
        kind = str(kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds)
        if "dynamic" in kind or kind == "longrope":
            raise ModelError(f"the rotary embedding {self.name} depends on the length of the sequence, {_REMEDY}")
        device = next(module.buffers()).device
        states = torch.zeros(1, dtype=dtype, device=device)
        types = () if layer_type is None else (layer_type,)
        try:
            cos, sin = module(states, torch.arange(positions, device=device)[None], *types)
            start, _ = module(states, torch.arange(2, device=device)[None], *types)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"the rotary embedding {self.name} is called otherwise ({error}), {_REMEDY}") from error
        if not torch.allclose(start.float(), cos[:, :2].float(), atol=1e-4):
            raise ModelError(f"the rotary embedding {self.name} depends on the length of the sequence, {_REMEDY}")
        half = cos.shape[-1] // 2
        # Each angle is there twice, for both members of a pair, in halves or as neighbours; or once.
        self.neox = torch.equal(cos[..., :half], cos[..., half:])
        once = slice(half) if self.neox else slice(None, None, 2)
        if not self.neox and not torch.equal(cos[..., ::2], cos[..., 1::2]):
            self.neox, once = True, slice(None)
        self.cos, self.sin = (table[0, :, once].float().contiguous() for table in (cos, sin))

    def variants(self, head_size: int) -> list[Rotation]:
        """The other pairs, the other way round, and both."""
        paired, backwards = copy(self), copy(self)
        paired.neox = not self.neox
        backwards.sin = -self.sin
        both = copy(backwards)
        both.neox = paired.neox
        others: list[Rotation] = [paired, backwards, both]
        return [*others, *(last for one in (self, *others) for last in one._at_the_end(head_size))]


class NoRotation:
    """A layer without positions (NoPE): keys stay as they are."""

    name = "none"

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys
