"""The KV of an application's documents: what goes wrong with it costs time, and never fails the application."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from blendrag import BlendEngine, BlendPrompt, EncodedChunk
from blendrag.errors import PromptError, StoreError

logger = logging.getLogger(__name__)

Prefix = str | BlendPrompt
Progress = Callable[[int, int], None]


def store_chunks(engine: BlendEngine, texts: Sequence[str], prefix: Prefix = "",
                 on_progress: Progress | None = None) -> list[EncodedChunk]:
    """`engine.encode`, one result for each text.

    A text that is too long for the model, and all of them where the store cannot be written, come back with an empty
    `key`, and with a warning in the log: a prompt computes what is not stored.
    """
    try:
        return _encode(engine, texts, prefix, on_progress or (lambda _done, _total: None))
    except StoreError as error:
        logger.warning("the KV of %d documents was not stored: %s", len(texts), error)
        return [EncodedChunk("", 0, False) for _ in texts]


def forget_chunks(engine: BlendEngine, texts: Sequence[str], prefix: Prefix = "") -> int:
    """`engine.forget`; where the store cannot be written, the log says that the KV is still there."""
    try:
        return engine.forget(texts, prefix)
    except StoreError as error:
        logger.warning("the KV of %d documents that are gone is still stored: %s", len(texts), error)
        return 0


def _encode(engine: BlendEngine, texts: Sequence[str], prefix: Prefix, report: Progress) -> list[EncodedChunk]:
    try:
        return engine.encode(texts, prefix, report)
    except PromptError as error:
        if len(texts) == 1:
            logger.warning("the KV of a document was not computed: %s", error)
            return [EncodedChunk("", 0, False)]
        # Nothing is computed before the texts are checked, so halving costs little.
        half, total = len(texts) // 2, len(texts)
        return (_encode(engine, texts[:half], prefix, lambda done, _: report(done, total))
                + _encode(engine, texts[half:], prefix, lambda done, _: report(half + done, total)))
