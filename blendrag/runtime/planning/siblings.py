"""Several samples of one prompt (n > 1): a request each for vLLM, of which one is blended."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from blendrag.runtime.compat import sampled_from

_REMEMBERED = 256
"""Prompts of which statistics are kept, the latest: the samples of one arrive together."""


class Siblings:
    """The statistics of the sample that was blended; the others found its blocks in the prefix cache.

    vLLM's answer carries those of whichever sample ended last, so all of them have the same.
    """

    def __init__(self) -> None:
        self._statistics: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def add(self, request_id: str, statistics: dict[str, Any]) -> None:
        """Takes the statistics of a request for which a blend pass ran; of several of one prompt the first's stay."""
        if prompt := sampled_from(request_id):
            self._statistics.setdefault(prompt, statistics)
            if len(self._statistics) > _REMEMBERED:
                self._statistics.popitem(last=False)

    def of(self, request_id: str) -> dict[str, Any] | None:
        """What was done for the prompt that a request samples from; None where no pass ran for it yet."""
        prompt = sampled_from(request_id)
        return self._statistics.get(prompt) if prompt else None
