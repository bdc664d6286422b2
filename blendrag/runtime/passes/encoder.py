"""Computes chunks for the store, each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

import torch

from blendrag.errors import PromptError
from blendrag.runtime.messages import Placement
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.entry_writer import EntryWriter
from blendrag.runtime.passes.forward import Forward, tiles
from blendrag.runtime.passes.lanes import EncodeLane
from blendrag.store import prefix_digest
from blendrag.store.keys import NEUTRAL


class Encoder:
    """Encodes chunks with the model vLLM loaded.  Runs in the worker, between vLLM's own forwards.

    Attributes:
        writer: stores what is computed.
        max_tokens: of a prefix and a chunk together: more have no positions in this model.
    """

    def __init__(self, model: BlendModel, forward: Forward, entries: Entries) -> None:
        self.model = model
        self.forward = forward
        self.entries = entries
        self.writer = EntryWriter(entries, model.device)
        tables = [len(layer.rotation.cos) for layer in model.layers if hasattr(layer.rotation, "cos")]
        self.max_tokens: int = min([model.vllm_config.model_config.max_model_len, *tables])

    def encode(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
               neutral: bool) -> list[tuple[str, bool]]:
        """Computes chunks behind a prefix and stores what is not stored yet.

        Entries travel and are written while the next chunks are computed; all are durable at the end.

        Args:
            scope: where they are stored.
            chunks: token ids of each chunk.
            prefix_ids: tokens before each chunk; stored too, as the exact entry of that prefix.
            neutral: the prefix only gives the attention a place to sink; file the chunks as the
                variant that serves any prompt.

        Returns:
            `(key, newly computed)` of each chunk; of equal ones the first is new.

        Raises:
            PromptError: prefix and chunk are longer than `max_tokens`.
        """
        variant, keys, present = self._known(scope, chunks, prefix_ids, neutral)
        missing = {key: ids for key, ids in zip(keys, chunks, strict=True) if key not in present}
        if missing:
            prefix = self.prefix(scope, prefix_ids)
            lanes = {key: self.lane(prefix, ids) for key, ids in missing.items()}
            left, writes = list(lanes), []
            try:
                for tile in tiles(list(lanes.values()), self.forward.max_rows):
                    self.forward.run_tile(tile)
                    for key in left[: sum(part.last for _, part in tile)]:  # lanes end in their order
                        writes.append(self.writer.add(scope, left.pop(0), lanes[key].leave(), variant, missing[key]))
            finally:
                wait(writes)
            self.entries.ranks.together(lambda: [write.result() for write in writes])
        return [(key, missing.pop(key, None) is not None) for key in keys]

    def prefix(self, scope: str, ids: Sequence[int]) -> Context:
        """The context of a prefix, computed and stored where it is not stored yet."""
        if not ids:
            return Context(self.model, 0, ())
        key = self.entries.key(scope, prefix_digest(()), ids)
        [entry] = self.entries.get([key], [len(ids)])
        if entry is None:
            lane = self.lane(Context(self.model, 0, ()), ids)
            self.forward.run([lane])
            entry = lane.entry()
            self.entries.put(scope, key, entry)  # without ids: a system prompt shall not be found within another prompt
        return Context(self.model, len(ids), [(Placement(0, len(ids), key, exact=True), entry)])

    def lane(self, prefix: Context, ids: Sequence[int]) -> EncodeLane:
        """What computes a chunk behind a prefix.

        Raises:
            PromptError: they are longer than `max_tokens`.  On a GPU, positions without a rotation end the process.
        """
        if prefix.tokens + len(ids) > self.max_tokens:
            raise PromptError(f"a chunk has {len(ids)} tokens and its prefix {prefix.tokens}, the model takes "
                              f"{self.max_tokens}: split it")
        return EncodeLane(prefix, torch.tensor(ids, dtype=torch.int64, device=self.model.device))

    def forget(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> int:
        """Deletes what `encode` stored; returns how many entries there were."""
        variant = _variant(prefix_ids, neutral)
        return self.entries.delete(list(dict.fromkeys(self.entries.key(scope, variant, ids) for ids in chunks)))

    def stored(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
               neutral: bool) -> list[bool]:
        """Which chunks `encode` would find stored."""
        _, keys, present = self._known(scope, chunks, prefix_ids, neutral)
        return [key in present for key in keys]

    def _known(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
               neutral: bool) -> tuple[bytes, list[str], set[str]]:
        """The digest of what chunks are encoded behind, their keys, and those that are stored."""
        variant = _variant(prefix_ids, neutral)
        keys = [self.entries.key(scope, variant, ids) for ids in chunks]
        return variant, keys, self.entries.present(keys)


def _variant(prefix_ids: Sequence[int], neutral: bool) -> bytes:
    """The digest of what chunks are encoded behind."""
    return NEUTRAL if neutral else prefix_digest(prefix_ids)
