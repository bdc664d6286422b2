"""The worker side of the connector: runs passes in each step, and reports what they did."""

from __future__ import annotations

import logging
from typing import Any

from blendrag.runtime.compat import FAILURES_NAME_REQUESTS
from blendrag.runtime.costs import Costs
from blendrag.runtime.fingerprint import Fingerprint
from blendrag.runtime.messages import AuditResult, BlendMetadata, BlendReport, BlendReports, EncodeReport, ModelFacts
from blendrag.runtime.passes.auditor import Auditor
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.passes.pass_queue import CONTEXT_TOKENS, SHARED_ROWS, PassQueue
from blendrag.runtime.passes.populating import Populating

logger = logging.getLogger(__name__)


class BlendConnectorWorker:
    """What a worker's `BlendConnector` does.

    Args:
        fingerprint: what entries are named after.
        apart: the scheduler is in another process.

    Attributes:
        queue, populating, auditor: None until the model is attached, and after the end.
        costs: what prefills take on this machine; None where that was not measured.
        quality: `Quality` of each policy, as mappings.
    """

    def __init__(self, fingerprint: Fingerprint, apart: bool) -> None:
        self.fingerprint = fingerprint
        self.queue: PassQueue | None = None
        self.populating: Populating | None = None
        self.auditor: Auditor | None = None
        self.costs: Costs | None = None
        self.quality: list[dict[str, Any]] = []
        self._apart = apart
        self._model_sent = ""
        self._reports: dict[str, BlendReport] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._unwritten: set[int] = set()
        self._encoded: EncodeReport | None = None
        self._audited: list[AuditResult] = []

    def attach(self, blender: Blender, encoder: Encoder) -> None:
        """Takes what runs the model's passes."""
        device = blender.model.device.type
        self.queue = PassQueue(blender, SHARED_ROWS if device == "cuda" else 0, CONTEXT_TOKENS[device])
        self.auditor = Auditor(blender)
        self.populating = Populating(encoder)
        self.fingerprint.start(blender.entries.fingerprint)
        for change in (self.populating.abandon, blender.entries.rename, self.queue.restart):  # in this order
            self.fingerprint.subscribe(change)
        self._model_sent = self.fingerprint.model

    @property
    def blender(self) -> Blender:
        """What computes the passes of requests."""
        assert self.queue is not None, "the engine must run with worker_cls=blendrag.runtime.worker.BlendWorker"
        return self.queue.blender

    def facts(self) -> ModelFacts | None:
        """What the scheduler side has to know of the model; None where none is attached."""
        if self.queue is None:
            return None
        entries = self.blender.entries
        return ModelFacts(entries.fingerprint, len(self.blender.model.layers), entries.ranks.size,
                          self.blender.reader is not None, self.costs)

    def step(self, metadata: BlendMetadata) -> None:
        """Does a step's share of the passes of requests, of encoding and of audits."""
        if self._apart:
            self.fingerprint.change(generation=metadata.generation)
        if metadata.quality is not None:
            self.quality = metadata.quality
        if metadata.jobs or metadata.pass_rows:
            assert self.queue is not None, "the engine must run with worker_cls=blendrag.runtime.worker.BlendWorker"
            self.queue.add(metadata.jobs)
            for request_id, report in self.queue.advance(metadata.pass_rows, metadata.idle).items():
                self._end(request_id, report)
        if metadata.encode_rows:
            assert self.populating is not None
            self._encoded = self.populating.advance(metadata.encode, metadata.sink_ids, metadata.encode_rows)
        if metadata.audit_rows:
            assert self.auditor is not None
            self._audited += self.auditor.advance(metadata.audits, metadata.audit_rows)

    def take_finished(self, ended: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks no pass writes any more, each once, and those of them whose blocks are not written.

        Args:
            ended: requests that have ended since the last step, aborted ones among them.
        """
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        if self.queue is not None and ended:
            finished |= self.queue.drop(ended)
        return finished, failed

    def take_unwritten_blocks(self) -> set[int]:
        """Blocks of requests whose passes failed, each once."""
        unwritten, self._unwritten = self._unwritten, set()
        return unwritten

    def take_reports(self) -> BlendReports | None:
        """What passes have done since the last call; None where that is nothing."""
        reports, self._reports = self._reports, {}
        encoded, self._encoded = self._encoded, None
        audited, self._audited = self._audited, []
        model = self.fingerprint.model if self._apart and self.fingerprint.model != self._model_sent else ""
        self._model_sent = self.fingerprint.model
        if not reports and encoded is None and not audited and not model:
            return None
        return BlendReports(reports, encoded, audited, model)

    def shutdown(self) -> None:
        """Lets go of the model."""
        if self.populating is not None:
            self.populating.close()
        if self.queue is not None:
            self.blender.entries.close()
        self.queue = self.populating = self.auditor = None

    def _end(self, request_id: str, report: BlendReport) -> None:
        self._reports[request_id] = report
        self._finished.add(request_id)
        if report.failure:
            logger.warning("the blend pass of request %s failed, prefilling in full: %s", request_id, report.failure)
        if report.unwritten:
            if FAILURES_NAME_REQUESTS:
                self._failed.add(request_id)
            else:
                self._unwritten.update(report.unwritten)
