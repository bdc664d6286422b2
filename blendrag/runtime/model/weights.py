"""Digests of a model's weights, in which every bit of every parameter counts.

On the CPU it is BLAKE3 over the tensors' bytes.  On other devices the weights stay where they are: each block of a
tensor is summed there with position-dependent factors, in 64-bit integer arithmetic, and only the sums are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import lru_cache

import torch
from blake3 import blake3

from blendrag.errors import ModelError

_BLOCK_WORDS = 2**22
"""32-bit words that are summed at a time on a device; they take 100 MB there."""
_SUMS = 2
"""Independent 64-bit sums of each block."""


class LoadedWeights:
    """Digests taken after vLLM loaded a model and before it post-processes the weights.

    Post-processing packs weights for the kernels that will use them; on the CPU it leaves parameters without elements.
    """

    def __init__(self) -> None:
        self._digests: list[tuple[weakref.ref[torch.nn.Module], bytes]] = []

    def take(self, model: torch.nn.Module) -> None:
        """Digests a model whose weights have just been loaded.

        Raises:
            ModelError: a parameter has no elements.
        """
        if not any(tensor.is_meta for _, tensor in model_tensors(model)):  # some loaders process the weights elsewhere
            self._digests.append((weakref.ref(model), weights_digest(model)))

    def of(self, model: torch.nn.Module) -> bytes:
        """The digest taken of a model, or of its weights as they are now where the loader post-processes none.

        Raises:
            ModelError: a parameter has no elements, so that models which differ in it could not be told apart.
        """
        return next((digest for taken, digest in self._digests if taken() is model), None) or weights_digest(model)


def weights_digest(model: torch.nn.Module) -> bytes:
    """Digest of all parameters and persistent buffers with their names, 32 bytes.

    Raises:
        ModelError: a parameter has no elements.
    """
    digest = blake3()
    for name, tensor in sorted(model_tensors(model), key=lambda item: item[0]):
        if tensor.is_meta or (isinstance(tensor, torch.nn.Parameter) and not tensor.numel()):
            raise ModelError(f"the parameter {name} has no elements, so models that differ in it would share stored "
                             "chunks: load the model with load_format='auto'")
        bare = name.replace(".base_layer", "")  # as it is called without enable_lora
        about = repr((bare, tuple(tensor.shape), str(tensor.dtype)))
        digest.update(about.encode()).update(tensor_digest(tensor))
    return digest.digest()


def state_digest(model: torch.nn.Module) -> bytes | None:
    """Digest of all tensors of a model that runs, to see whether something changed them.

    None where a parameter has no elements: its weights are where they cannot be read.
    """
    if not all(parameter.numel() for parameter in model.parameters()):
        return None
    digest = blake3()
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for key, tensor in sorted({**module._parameters, **module._buffers, **plain}.items()):
            if tensor is not None and not tensor.is_meta:
                digest.update(repr((name, key, tuple(tensor.shape), str(tensor.dtype))).encode())
                digest.update(tensor_digest(tensor))
    return digest.digest()


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint of the model holds: other buffers follow from the configuration."""
    yield from model.named_parameters()
    derived = {id(buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
               if name in module._non_persistent_buffers_set}
    yield from ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in derived)


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Digest of a tensor's elements, bit by bit, 32 bytes."""
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised tensor that is made of others
        names, _ = tensor.__tensor_flatten__()
        parts = [tensor_digest(getattr(tensor, name)) for name in names]
        return blake3(b"".join(parts)).digest()
    flat = tensor.detach().reshape(-1)
    raw = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)
    if raw.device.type == "cpu":
        return blake3(max_threads=blake3.AUTO).update(raw.numpy().data).digest()
    return blake3(block_sums(raw).cpu().numpy().tobytes()).digest()


def block_sums(raw: torch.Tensor) -> torch.Tensor:
    """Sums that tell apart byte strings of one length, int64 [blocks, 2], on the bytes' device.

    A block's sum is that of its 32-bit words, each times a factor of its place, modulo 2**64.  As the factors are odd,
    a word that changes changes the sum; for several words the sum is a universal hash.  The order of the blocks counts.

    Args:
        raw: uint8 [bytes].
    """
    factors = _factors(raw.device)
    size = 4 * _BLOCK_WORDS
    return torch.stack([(_words(raw[start : start + size]) * factors[:, : -(-min(size, len(raw) - start) // 4)]).sum(1)
                        for start in range(0, len(raw), size)])


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit words, the last one filled up with zeros."""
    if len(raw) % 4 or raw.data_ptr() % 4:
        raw = torch.cat([raw, raw.new_zeros(-len(raw) % 4)])
    return raw.view(torch.int32).long()


@lru_cache(1)
def _factors(device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers, int64 [sums, words]: SplitMix64 of the place."""
    place = torch.arange(1, _SUMS * _BLOCK_WORDS + 1, device=device, dtype=torch.int64)
    mixed: torch.Tensor = place * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed = (mixed ^ _shifted(mixed, 31)) | 1
    return mixed.view(_SUMS, _BLOCK_WORDS)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    mask: int = 2 ** (64 - bits) - 1
    return (numbers >> bits) & mask


def _signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    return number - 2**64 if number >= 2**63 else number
