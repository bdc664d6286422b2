"""The kinds of rows a pass runs: those that are blended, those that measure, those that are encoded."""

from __future__ import annotations

from typing import Any

import torch

from blendrag.policies import Attention, Deviation
from blendrag.runtime.model.blend_model import BlendModel, Layer
from blendrag.runtime.passes.attention import attend, attend_and_weigh, weights
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.drift import Drift
from blendrag.runtime.passes.forward import Lane, Part
from blendrag.runtime.passes.host_copy import HostCopy
from blendrag.runtime.passes.ranks import Ranks
from blendrag.runtime.passes.rows import Rows
from blendrag.runtime.passes.sparsity import Sparsity
from blendrag.store import KVEntry

_LEAD = 64
_SCORED_ROWS = 512


class _ContextLane(Lane):
    """Rows of a prompt over its context.  `mask` says which tokens are rows: bool [tokens]."""

    def __init__(self, context: Context, ids: torch.Tensor, mask: torch.Tensor,
                 valid: torch.Tensor | None = None) -> None:
        self.context = context
        self.context_tokens = context.tokens
        self.positions = mask.nonzero()[:, 0]
        self.ids = ids[self.positions]
        self._valid = valid
        self._rows: dict[tuple[int, bool], Rows] = {}

    def rows(self, part: Part, sparsity: Sparsity | None = None) -> Rows:
        """What the part's rows may see; kept so that masks are built once for all layers."""
        key = part.rows.start, sparsity is None
        if any(start != part.rows.start for start, _ in self._rows):  # parts come one after the other
            self._rows.clear()
        if key not in self._rows:
            self._rows[key] = Rows(self.positions[part.rows], self.context.tokens, self._valid, sparsity)
        return self._rows[key]


class BlendLane(_ContextLane):
    """Recomputes rows over the context and writes the merged KV to the paged cache.

    Args:
        write_from: the first token that is written.
        block_ids: the request's blocks, per KV cache group; empty: nothing is written.
        dense_layers: number of the first layers in which `sparsity` does not hold.
        drift: moves what is not recomputed along with what is.
    """

    def __init__(self, context: Context, ids: torch.Tensor, mask: torch.Tensor, write_from: int,
                 block_ids: tuple[list[int], ...], sparsity: Sparsity | None = None, dense_layers: int = 0,
                 drift: Drift | None = None) -> None:
        super().__init__(context, ids, mask)
        self._write_from = write_from
        self._sparsity = sparsity
        self._dense_layers = dense_layers
        self._drift = drift
        self._slots: dict[int, torch.Tensor] = {}
        for layer in context.model.layers:
            if block_ids and layer.group not in self._slots:
                self._slots[layer.group] = self._slot_mapping(block_ids[layer.group], layer.block_size)

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        all_k, all_v = self.context.merged(index, part, self.positions[part.rows], k, v, self._drift)
        if part.last and self._slots:
            layer.impl.do_kv_cache_update(layer.attention, all_k[self._write_from :], all_v[self._write_from :],
                                          layer.attention.kv_cache, self._slots[layer.group])
        if index == len(self.context.model.layers) - 1:
            return None  # nothing of the last layer but K and V is of use: the last token is vLLM's
        return self._attend(index, layer, part, q, all_k, all_v)

    def _attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, all_k: torch.Tensor,
                all_v: torch.Tensor) -> torch.Tensor:
        rows = self.rows(part, self._sparsity if index >= self._dense_layers else None)
        return attend(q, all_k, all_v, rows, scale=layer.scale, window=layer.window, soft_cap=layer.soft_cap)

    def _slot_mapping(self, block_ids: list[int], block_size: int) -> torch.Tensor:
        """int64 [tokens written]: where each token lies in the paged cache."""
        positions = torch.arange(self._write_from, self.context.tokens)
        blocks = torch.tensor(block_ids)[positions // block_size]
        return (blocks * block_size + positions % block_size).to(self.context.model.device)


class FirstTokenLane(BlendLane):
    """A blend pass that writes nothing and goes on to the prompt's last token, which otherwise vLLM computes.

    Args:
        last: int64 [1], the prompt's last token, which stands behind the context.

    Attributes:
        hidden: what the model makes of the last token, once it has run; [1, hidden size].
    """

    def __init__(self, context: Context, ids: torch.Tensor, mask: torch.Tensor, last: torch.Tensor,
                 sparsity: Sparsity | None = None, dense_layers: int = 0, drift: Drift | None = None) -> None:
        super().__init__(context, ids, mask, 0, (), sparsity, dense_layers, drift)
        self.hidden: torch.Tensor | None = None
        position = torch.tensor([context.tokens], device=context.model.device)
        self.positions = torch.cat([self.positions, position])
        self.ids = torch.cat([self.ids, last])
        self._last_row = Rows(position, context.tokens + 1)

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        if not part.last:
            return super().attend(index, layer, part, q, k, v)
        before = Part(slice(part.rows.start, part.rows.stop - 1), last=True)
        all_k, all_v = self.context.merged(index, before, self.positions[before.rows], k[:-1], v[:-1], self._drift)
        out = torch.zeros_like(q)
        out[-1:] = attend(q[-1:], torch.cat([all_k, k[-1:]]), torch.cat([all_v, v[-1:]]), self._last_row,
                          scale=layer.scale, window=layer.window, soft_cap=layer.soft_cap)
        if len(q) > 1 and index < len(self.context.model.layers) - 1:
            out[:-1] = self._attend(index, layer, before, q[:-1], all_k, all_v)
        return out

    def finish(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden.clone()


class AttentionLane(_ContextLane):
    """Measures how much the question's rows attend to each token; see `blendrag.policies.Attention`."""

    def __init__(self, context: Context, ids: torch.Tensor, question_start: int, evidence: Attention,
                 ranks: Ranks) -> None:
        # Attention needs the prompt's first tokens (its sink); where they are not stored they are rows too.
        mask = torch.zeros_like(context.stored)
        mask[question_start:] = True
        lead = context.entries[0][0].start if context.entries and not context.cached_tokens else 0
        mask[: min(lead, _LEAD)] = True
        super().__init__(context, ids, mask, valid=context.stored | mask)
        self._question_start = question_start
        self._on_stored = bool((context.stored & mask).any())  # the blend pass compares with what is stored there
        self._evidence = evidence
        self._ranks = ranks
        self.depth = evidence.layers[-1] + 1
        self.scores = torch.zeros(context.tokens, device=context.model.device)
        self._sums = {index: torch.zeros_like(self.scores) for index in evidence.layers}
        self._asking: dict[int, list[tuple[slice, Rows]]] = {}

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        positions = self.positions[part.rows]
        all_k, all_v = self.context.merged(index, part, positions, k, v, aside=self._on_stored)
        rows = self.rows(part)
        settings: Any = {"scale": layer.scale, "window": layer.window, "soft_cap": layer.soft_cap}
        out: torch.Tensor | None = None
        if index in self._evidence.layers:
            for piece, asking in self._questions(part):
                if piece == slice(0, len(q)) and not q.is_cuda:
                    out, found = attend_and_weigh(q, all_k, all_v, asking, **settings)
                else:
                    found = weights(q[piece], all_k, asking, **settings)
                found = self._ranks.total(found) / (len(q[0]) * self._ranks.size)
                self._sums[index] += found.square().sum(0) if self._evidence.over_rows == "norm" else found.sum(0)
            if part.last:
                self.scores += self._sums[index].sqrt() if self._evidence.over_rows == "norm" else self._sums[index]
            if index == self._evidence.layers[-1]:
                return None
        return attend(q, all_k, all_v, rows, **settings) if out is None else out

    def _questions(self, part: Part) -> list[tuple[slice, Rows]]:
        """Those of the part's rows that belong to the question, in pieces whose weights fit into memory."""
        if part.rows.start not in self._asking:
            positions = self.positions[part.rows]
            first = int((positions < self._question_start).sum())
            pieces = [slice(at, min(at + _SCORED_ROWS, len(positions)))
                      for at in range(first, len(positions), _SCORED_ROWS)]
            self._asking = {part.rows.start: [  # parts come one after the other
                (piece, Rows(positions[piece], self.context.tokens, self._valid)) for piece in pieces]}
        return self._asking[part.rows.start]


class DeviationLane(_ContextLane):
    """Computes rows up to the check layer and compares; see `blendrag.policies.Deviation`.

    The context retains the fresh KV, so that a later pass over fewer rows sees what it would have seen had this one
    gone on with them.  Of layer 0 there is nothing to retain: it depends on nothing but the token and its place.
    """

    def __init__(self, context: Context, ids: torch.Tensor, mask: torch.Tensor, evidence: Deviation,
                 ranks: Ranks) -> None:
        over = Context(context.model, context.tokens, ()) if mask.all() else context  # nothing stored would be seen
        super().__init__(over, ids, mask)
        self._stored = context
        self._evidence = evidence
        self._ranks = ranks
        self.depth = evidence.layer + 1
        self.scores = torch.zeros(context.tokens, device=context.model.device)

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        positions = self.positions[part.rows]
        if index == self._evidence.layer:
            stored_k, stored_v = self._stored.layer(index)
            fresh, stored = (k, stored_k) if self._evidence.of == "k" else (v, stored_v)
            self.scores[positions] = self._ranks.total(
                (fresh.float() - stored[positions].float()).square().sum((1, 2)))
        if index > 0:
            self._stored.retain(index, positions, k, v)
        if index == self._evidence.layer:
            return None
        all_k, all_v = self.context.merged(index, part, positions, k, v)
        return attend(q, all_k, all_v, self.rows(part), scale=layer.scale, window=layer.window,
                      soft_cap=layer.soft_cap)


class EncodeLane(_ContextLane):
    """Computes a chunk behind a prefix and keeps its KV, keys unrotated.

    Its parts may run in different steps of the engine: what later parts attend to stays with the lane until then.
    """

    def __init__(self, prefix: Context, ids: torch.Tensor) -> None:
        model: BlendModel = prefix.model
        before = prefix.tokens
        context = Context(model, before + len(ids), prefix.entries)
        mask = torch.ones(context.tokens, dtype=torch.bool, device=model.device)
        mask[:before] = False
        padded = torch.cat([torch.zeros(before, dtype=ids.dtype, device=ids.device), ids])
        super().__init__(context, padded, mask)
        self._before = before
        self._unfinished: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._k: list[torch.Tensor] = []  # [tokens, kv heads, head size] of each layer that all parts went through
        self._v: list[torch.Tensor] = []

    def attend(self, index: int, layer: Layer, part: Part, q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> torch.Tensor | None:
        all_k, all_v = self._merged(index, part, k, v)
        if part.last:
            self._k.append(layer.rotation.unrotate(all_k[self._before :], self.positions))
            self._v.append(all_v[self._before :].clone())
        if index == len(self.context.model.layers) - 1:
            return None
        return attend(q, all_k, all_v, self.rows(part), scale=layer.scale, window=layer.window,
                      soft_cap=layer.soft_cap)

    def leave(self) -> HostCopy:
        """Hands over what was computed, on its way to host memory."""
        copy = HostCopy(self._k, self._v)
        self._k, self._v = [], []
        return copy

    def entry(self) -> KVEntry:
        """What was computed, in host memory."""
        return self.leave().entry()

    def _merged(self, index: int, part: Part, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, prefix and all rows so far; of many small parts each is copied once."""
        positions = self.positions[part.rows]
        if part.last and part.rows.start == 0:
            return self.context.merged(index, part, positions, k, v)
        if index not in self._unfinished:
            # Buffers of the device loader serve the next layer: these have to stay.
            all_k, all_v = self.context.layer(index)
            self._unfinished[index] = (all_k.clone(), all_v.clone()) if all_k.is_cuda else (all_k, all_v)
        all_k, all_v = self._unfinished.pop(index) if part.last else self._unfinished[index]
        all_k.index_copy_(0, positions, k)
        all_v.index_copy_(0, positions, v)
        return all_k, all_v
