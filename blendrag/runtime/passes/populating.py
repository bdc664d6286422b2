"""Encodes what requests brought along, a few rows in each step of the engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait

from blendrag.errors import PromptError
from blendrag.runtime.messages import EncodeReport, Missing
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.passes.forward import Part
from blendrag.runtime.passes.host_copy import HostCopy
from blendrag.runtime.passes.lanes import EncodeLane
from blendrag.store import prefix_digest
from blendrag.store.keys import NEUTRAL

logger = logging.getLogger(__name__)

_WRITE_S = 0.005
"""How long a step that has no rows to compute waits for a write, instead of making the engine spin."""
_LANE_ROWS = 16
"""What a chunk's share of a forward takes besides its rows, in rows (SmolLM2, 2 CPU cores): there may be many."""


class _Chunk:
    """A chunk on its way into the store.

    Attributes:
        lane: what computes it, from its first row to its last.
        rows: rows that are computed.
        write: of its entry, once it is computed.
        skipped: there is nothing to compute.
    """

    def __init__(self, missing: Missing) -> None:
        self.missing = missing
        self.key = ""
        self.lane: EncodeLane | None = None
        self.rows = 0
        self.write: Future[None] | None = None
        self.skipped = False

    @property
    def left(self) -> int:
        """Rows to compute."""
        return 0 if self.skipped else len(self.missing.ids) - self.rows


class Populating:
    """The chunks that requests brought along, on their way into the store, in order.

    No request waits for one, so a failure is a line in the log.  Entries are written by a thread: files are synced.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._chunks: deque[_Chunk] = deque()
        self._done = 0

    def advance(self, missing: Sequence[Missing], sink_ids: Sequence[int], rows: int) -> EncodeReport:
        """Takes more chunks, and computes so many rows at most.

        Args:
            sink_ids: what chunks that are no prefixes are encoded behind.
        """
        self._chunks.extend(map(_Chunk, missing))
        computed = spent = 0
        started = time.perf_counter()
        try:
            while spent < rows and (tile := self._tile(sink_ids, rows - spent)):
                self.encoder.forward.timed_tile([(lane, part) for _, lane, part in tile])
                spent += _LANE_ROWS * len(tile)
                for chunk, lane, part in tile:
                    count = part.rows.stop - part.rows.start
                    chunk.rows, computed, spent = chunk.rows + count, computed + count, spent + count
                    if part.last:
                        self._write(chunk, lane.leave())
            seconds = time.perf_counter() - started
            self._end()
        except Exception as error:
            logger.warning("%d chunks of requests could not be stored: %s", len(self._chunks), error)
            logger.debug("populating failed", exc_info=True)
            self._done += len(self._chunks)
            self._chunks.clear()
            return EncodeReport(self._done)
        return EncodeReport(self._done, computed, seconds)

    def abandon(self, _fingerprint: str = "") -> None:
        """Drops what is not computed; returns when what is has been written.

        Called before entries get another fingerprint: the KV of earlier weights must not be named after it.
        """
        for chunk in self._chunks:
            chunk.lane, chunk.skipped = None, True
        wait([chunk.write for chunk in self._chunks if chunk.write is not None])

    def close(self) -> None:
        """Drops what is not computed; returns when what is has been written."""
        self._chunks.clear()
        self.encoder.writer.close()

    def _tile(self, sink_ids: Sequence[int], rows: int) -> list[tuple[_Chunk, EncodeLane, Part]]:
        """The next rows, as many as one forward takes; empty where all are computed."""
        room = min(rows, self.encoder.forward.max_rows)
        tile: list[tuple[_Chunk, EncodeLane, Part]] = []
        for chunk in self._chunks:
            if room == 0:
                break
            if chunk.lane is None and chunk.left:
                chunk.lane = self._lane(chunk, sink_ids)
            if chunk.lane is not None and chunk.left:
                count = min(room, chunk.left)
                room = max(0, room - count - _LANE_ROWS)
                tile.append((chunk, chunk.lane, Part(slice(chunk.rows, chunk.rows + count), count == chunk.left)))
        return tile

    def _lane(self, chunk: _Chunk, sink_ids: Sequence[int]) -> EncodeLane | None:
        """None where the chunk is stored meanwhile, or too long."""
        encoder, missing = self.encoder, chunk.missing
        chunk.key = self._key(missing)
        chunk.skipped = chunk.key in encoder.entries.present([chunk.key])
        if chunk.skipped:
            return None
        try:
            prefix = Context(encoder.model, 0, ()) if missing.is_prefix else encoder.prefix(missing.scope, sink_ids)
            return encoder.lane(prefix, missing.ids)
        except PromptError as error:
            logger.warning("a chunk of a request is not stored: %s", error)
            chunk.skipped = True
            return None

    def _write(self, chunk: _Chunk, copy: HostCopy) -> None:
        chunk.lane = None
        missing = chunk.missing
        found_by = (None, None) if missing.is_prefix else (NEUTRAL, missing.ids)  # as in `Encoder.prefix`
        chunk.write = self.encoder.writer.add(missing.scope, chunk.key, copy, *found_by)

    def _end(self) -> None:
        """Drops the chunks that are done with, from the first on."""
        if self._chunks and not any(chunk.left for chunk in self._chunks):
            wait([chunk.write for chunk in self._chunks if chunk.write is not None], _WRITE_S)
        while self._chunks and not self._chunks[0].left:
            write = self._chunks[0].write
            if write is not None:
                if not write.done():
                    break
                if error := write.exception():
                    logger.warning("a chunk of a request could not be stored: %s", error)
            self._chunks.popleft()
            self._done += 1

    def _key(self, missing: Missing) -> str:
        variant = prefix_digest(()) if missing.is_prefix else NEUTRAL
        return self.encoder.entries.key(missing.scope, variant, missing.ids)
