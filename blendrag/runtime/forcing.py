"""Teacher forcing: a request is given its answer, token by token, and only the probabilities are the model's.

vLLM's log-probabilities are those of the raw logits (`logprobs_mode`), so what forces a token does not show in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from blendrag.runtime.compat import logits_processor_interfaces

FORCED = "blendrag_forced"
"""Key of `SamplingParams.extra_args`: the token ids of the answer."""

PROCESSOR = f"{__name__}:ForcedTokens"
"""How the engine argument `logits_processors` names the class below."""


def forced_params(token_ids: Sequence[int], top: int) -> SamplingParams:
    """Parameters of a request that answers with these tokens.

    Args:
        top: tokens of each place whose log-probabilities are wanted, the likeliest ones; no more than the engine's
            `max_logprobs`.
    """
    return SamplingParams(temperature=0, max_tokens=len(token_ids), ignore_eos=True, logprobs=top, flat_logprobs=True,
                          detokenize=False, extra_args={FORCED: list(token_ids)})


def read_logprobs(output: Any) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """Token ids and log-probabilities of each place of a `CompletionOutput` whose request asked for flat ones."""
    flat = output.logprobs
    places = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        # The token that was sampled comes first, and once more where it is among the likeliest.
        ids, first = np.unique(np.asarray(flat.token_ids[start:end], np.int64), return_index=True)
        places.append((ids, np.asarray(flat.logprobs[start:end], np.float64)[first]))
    return places


class ForcedTokens(*logits_processor_interfaces()):  # type: ignore[misc]
    """A logits processor for either of vLLM's model runners, which construct and call it in different ways."""

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        # The older runner passes a device and a flag, the newer one the state of its requests.
        self._state: Any = runner[0] if len(runner) == 1 else None
        self._forced: dict[int, tuple[list[int], list[int]]] = {}  # the answer, and the output so far (older runner)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """ValueError where the forced answer is no list of token ids."""
        ids = (sampling_params.extra_args or {}).get(FORCED)
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise ValueError(f"{FORCED} is a list of token ids")

    def is_argmax_invariant(self) -> bool:
        """It sets the argmax."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Older runner: requests came, went, or moved to other rows."""
        process_dict_updates(self._forced, batch_update, lambda params, _, output: _entry(params, output))

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Newer runner: a request takes a slot that another may have had before."""
        entry = _entry(sampling_params, [])
        if entry is None:
            self._forced.pop(req_idx, None)
        else:
            self._forced[req_idx] = entry
        return entry is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Leaves one token to each row of a request that is forced.  `logits` is [rows, vocabulary]."""
        if not self._forced:
            return logits
        if ctx is None:
            places = [(row, row, len(output)) for row, (_, output) in self._forced.items()]
        else:
            prompt_len = self._state.prompt_len.np
            rows = zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)
            places = [(row, slot, position + 1 - int(prompt_len[slot]))
                      for row, (slot, position) in enumerate(rows) if slot in self._forced]
        for row, slot, position in places:
            ids = self._forced[slot][0]
            if 0 <= position < len(ids):
                logits[row] = float("-inf")
                logits[row, ids[position]] = 0.0
        return logits


def _entry(params: SamplingParams, output: list[int]) -> tuple[list[int], list[int]] | None:
    ids = (params.extra_args or {}).get(FORCED)
    return (ids, output) if ids else None
