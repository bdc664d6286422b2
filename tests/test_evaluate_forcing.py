"""Forced answers, for either of vLLM's model runners: the structures are theirs, the batches are written by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from blendrag.runtime.forcing import FORCED, ForcedTokens, forced_params, read_logprobs

FREE = SamplingParams()


def chosen(processor: ForcedTokens, rows: int, ctx: object = None) -> list[int | None]:
    """For each row the token that it is forced to; None where its logits are untouched."""
    logits = torch.arange(10.0).repeat(rows, 1)
    found = processor.apply(logits.clone(), ctx)
    return [None if torch.equal(row, logits[0]) else int(row.argmax()) for row in found]


def test_the_older_runner_adds_moves_and_removes_requests() -> None:
    processor = ForcedTokens(None, torch.device("cpu"), False)
    assert not processor.is_argmax_invariant()
    outputs: list[list[int]] = [[], []]
    processor.update_state(BatchUpdate(3, removed=[], moved=[], added=[
        (0, FREE, [1], []), (1, forced_params([4, 5], 8), [1], outputs[0]),
        (2, forced_params([7], 8), [1], outputs[1])]))
    assert chosen(processor, 3) == [None, 4, 7]
    outputs[0].append(4)
    outputs[1].append(7)
    processor.update_state(None)
    assert chosen(processor, 3) == [None, 5, None], "the second answer has ended"
    processor.update_state(BatchUpdate(2, removed=[0], added=[], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert chosen(processor, 2) == [5, None]
    processor.update_state(BatchUpdate(2, removed=[], moved=[], added=[(0, FREE, [1], [])]))
    assert chosen(processor, 2) == [None, None]


def test_the_newer_runner_has_slots_and_rows_in_any_order() -> None:
    state = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([5, 0, 3, 9])))
    processor = ForcedTokens(None, state)
    assert processor.add_request(2, forced_params([4, 5], 8))
    assert processor.add_request(0, forced_params([6], 8))
    assert not processor.add_request(3, FREE)

    def step(*rows: tuple[int, int]) -> SimpleNamespace:
        """Rows of (slot, position of the last token that is seen)."""
        slots, positions = zip(*rows, strict=True)
        return SimpleNamespace(expanded_idx_mapping=torch.tensor(slots), pos=torch.tensor(positions))

    assert chosen(processor, 3, step((3, 8), (2, 2), (0, 4))) == [None, 4, 6]
    assert chosen(processor, 2, step((2, 3), (0, 5))) == [5, None]
    assert chosen(processor, 1, step((0, 2))) == [None], "its prompt is not done"
    assert not processor.add_request(2, FREE), "the slot has another request now"
    assert chosen(processor, 1, step((2, 3))) == [None]


@pytest.mark.parametrize("ids", ["text", [1, "two"], [-1], [True]])
def test_what_is_no_answer_is_refused(ids: object) -> None:
    with pytest.raises(ValueError, match="a list of token ids"):
        ForcedTokens.validate_params(SamplingParams(extra_args={FORCED: ids}))
    ForcedTokens.validate_params(FREE)
    ForcedTokens.validate_params(forced_params([1], 8))


def test_logprobs_are_read_place_by_place_and_each_token_once() -> None:
    flat = FlatLogprobs()
    flat.append_fast([7, 3, 7], [-0.5, -0.1, -0.5], iter([2, 1, 2]), [None] * 3)  # type: ignore[arg-type]
    flat.append_fast([2, 4], [-1.0, -0.2], iter([2, 1]), [None] * 2)  # type: ignore[arg-type]
    first, second = read_logprobs(SimpleNamespace(logprobs=flat))
    assert [first[0].tolist(), first[1].tolist()] == [[3, 7], [-0.1, -0.5]]
    assert [second[0].tolist(), second[1].tolist()] == [[2, 4], [-1.0, -0.2]]
