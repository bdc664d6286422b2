"""Computes chunks for the store, each on its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from blendrag.runtime.messages import Missing, Placement
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.forward import Forward
from blendrag.runtime.passes.lanes import EncodeLane
from blendrag.store import prefix_digest
from blendrag.store.keys import NEUTRAL

logger = logging.getLogger(__name__)


class Encoder:
    """Encodes chunks with the model vLLM loaded.  Runs in the worker, between vLLM's own forwards."""

    def __init__(self, model: BlendModel, forward: Forward, entries: Entries) -> None:
        self.model = model
        self.forward = forward
        self.entries = entries

    def encode(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
               neutral: bool) -> list[tuple[str, bool]]:
        """Computes chunks behind a prefix and stores what is not stored yet.

        Args:
            chunks: token ids of each chunk.
            prefix_ids: tokens before each chunk; stored too, as the exact entry of that prefix.
            neutral: the prefix only gives the attention a place to sink; file the chunks as the
                variant that serves any prompt.

        Returns:
            `(key, newly computed)` of each chunk; of equal ones the first is new.
        """
        variant, keys, present = self._known(chunks, prefix_ids, neutral)
        missing = {key: ids for key, ids in zip(keys, chunks, strict=True) if key not in present}
        if missing:
            prefix = self._prefix(prefix_ids)
            lanes = {key: EncodeLane(prefix, self._tensor(ids)) for key, ids in missing.items()}
            self.forward.run(list(lanes.values()))
            for key, lane in lanes.items():
                self.entries.put(key, lane.entry(), variant, missing[key])
        return [(key, missing.pop(key, None) is not None) for key in keys]

    def forget(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> int:
        """Deletes what `encode` stored; returns how many entries there were."""
        variant = _variant(prefix_ids, neutral)
        return self.entries.delete(list(dict.fromkeys(self.entries.key(variant, ids) for ids in chunks)))

    def stored(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> list[bool]:
        """Which chunks `encode` would find stored."""
        _, keys, present = self._known(chunks, prefix_ids, neutral)
        return [key in present for key in keys]

    def populate(self, missing: Sequence[Missing], sink_ids: Sequence[int]) -> None:
        """`encode` for what requests brought along: nobody waits for it, so a failure is only told."""
        try:
            self.encode([chunk.ids for chunk in missing if not chunk.is_prefix], sink_ids, neutral=True)
            for prefix in missing:
                if prefix.is_prefix:
                    self._prefix(prefix.ids)
        except Exception as error:
            logger.warning("%d chunks of a request could not be stored: %s", len(missing), error)

    def _known(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
               neutral: bool) -> tuple[bytes, list[str], set[str]]:
        """The digest of what chunks are encoded behind, their keys, and those that are stored."""
        variant = _variant(prefix_ids, neutral)
        keys = [self.entries.key(variant, ids) for ids in chunks]
        return variant, keys, self.entries.present(keys)

    def _prefix(self, ids: Sequence[int]) -> Context:
        """The context of a prefix, computed and stored where it is not stored yet."""
        if not ids:
            return Context(self.model, 0, ())
        key = self.entries.key(prefix_digest(()), ids)
        [entry] = self.entries.get([key])
        if entry is None:
            lane = EncodeLane(Context(self.model, 0, ()), self._tensor(ids))
            self.forward.run([lane])
            entry = lane.entry()
            self.entries.put(key, entry)  # without ids: a system prompt shall not be found within another prompt
        return Context(self.model, len(ids), [(Placement(0, len(ids), key, exact=True), entry)])

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.model.device)


def _variant(prefix_ids: Sequence[int], neutral: bool) -> bytes:
    """The digest of what chunks are encoded behind."""
    return NEUTRAL if neutral else prefix_digest(prefix_ids)
