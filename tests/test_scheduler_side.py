"""The scheduler side of the connector, asked as vLLM's scheduler asks it; block hashes and pool are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool

from blendrag import BlendConfig
from blendrag.blend_params import BLEND_PARAMS_KEY
from blendrag.runtime.fingerprint import Fingerprint
from blendrag.runtime.messages import BlendReport, BlendReports, ModelFacts
from blendrag.runtime.planning.scheduler_side import BlendConnectorScheduler
from blendrag.store import ChunkStore, KVEntry, entry_key
from blendrag.store.keys import NEUTRAL
from tests.helpers import make_request

BLOCK, LAYERS, BATCH = 4, 2, 64
PREFIX, A, B, QUESTION = list(range(5)), list(range(10, 34)), list(range(40, 64)), list(range(70, 79))
C = list(range(300, 400))
PROMPT = PREFIX + A + B + QUESTION
ANSWER = list(range(80, 95))
EXACT = BLOCK
"""Tokens of the prefix that fill blocks: no chunk stands before them."""
STEP: Any = SimpleNamespace(num_scheduled_tokens={}, scheduled_new_reqs=[], total_num_scheduled_tokens=0)


class Scheduler:
    """What of vLLM's scheduler concerns a connector: the order of its hooks, and the prefix cache."""

    def __init__(self, reads_cache: bool = False, **config: Any) -> None:
        vllm_config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK, prefix_match_unit=None, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=BATCH),
            model_config=SimpleNamespace(skip_tokenizer_init=True, max_model_len=500), kv_transfer_config=None)
        groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(
            dcp_sharded=False))], num_blocks=200)
        self.store = ChunkStore()
        self.side = BlendConnectorScheduler(vllm_config, groups, BlendConfig(**{"policy": "none"} | config), self.store,
                                            Fingerprint(), apart=True)
        self.side.start(ModelFacts("model", LAYERS, reads_cache=reads_cache))
        self.pool = self.side.block_pool = BlockPool(200, enable_caching=True, hash_block_size=BLOCK)
        for ids in (A, B, C):
            kv = torch.zeros(LAYERS, len(ids), 1, 2)
            self.store.put(entry_key("model", "default", NEUTRAL, ids), KVEntry(kv, kv), fingerprint="model",
                           namespace="default")

    def add(self, name: str, ids: list[int] = PROMPT, marks: Any = None, **options: Any) -> Any:
        """A request that marks where A and B stand in the usual prompt."""
        request = make_request(ids, BLOCK, **options)
        request.request_id = name
        request.kv_transfer_params = {BLEND_PARAMS_KEY: {"spans": [[5, 29], [29, 53]]} if marks is None else marks}
        self.side.add(request)
        return request

    def cached(self, request: Any) -> int:
        """Tokens of a request that the prefix cache holds."""
        count = 0
        for name in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if self.pool.get_cached_block(name, [0]) is None:
                break
            count += BLOCK
        return count

    def schedule(self, request: Any) -> int | None:
        """How many tokens a pass has to fill; None where that is to be asked again."""
        tokens = self.side.tokens_to_load(request, self.cached(request))
        if tokens is not None:
            request.prefill_stats.set(request.num_prompt_tokens, self.cached(request), tokens)
            self.side.allocate(request, ([0],), tokens)
        return tokens

    def compute(self, request: Any, answer: list[int] | None = None) -> None:
        """The request's blocks are written and cached, those of its answer too."""
        if answer:
            request.append_output_token_ids(answer)
        full = (request.num_tokens - 1) // BLOCK
        done = self.cached(request) // BLOCK
        if full > done:
            self.pool.cache_full_blocks(request=request, blocks=self.pool.get_new_blocks(full), num_cached_blocks=done,
                                        num_full_blocks=full, block_size=BLOCK, kv_cache_group_id=0)

    def report(self, request: Any, **report: Any) -> None:
        self.side.update(BlendReports({request.request_id: BlendReport(**report)}))

    def answer(self, name: str, ids: list[int] = PROMPT, answer: list[int] = ANSWER, marks: Any = None) -> Any:
        """A request from its arrival to its end; returns what its answer says of blending."""
        request = self.add(name, ids, marks)
        if self.schedule(request):
            self.side.build(STEP)
            self.report(request, reused=20)
            self.side.allocate(request, ([0],), 0)
        self.compute(request, answer)
        told = self.side.finish(request)
        return told[BLEND_PARAMS_KEY] if told else None


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.store.close()


def held(scheduler: Scheduler) -> int:
    side = scheduler.side
    return sum(map(len, (side._plans, side._jobs, side._loading, side._blocks_loading, side._reports)))


def test_a_request_that_reuses_chunks_waits_for_a_pass_over_all_tokens_but_the_last(scheduler: Scheduler) -> None:
    request = scheduler.add("a")
    assert scheduler.schedule(request) == len(PROMPT) - 1
    message = scheduler.side.build(STEP)
    [job] = message.jobs
    assert (job.request_id, job.write_from, len(job.placements), message.pass_rows) == ("a", 0, 2, BATCH)
    assert scheduler.side.build(STEP).pass_rows == BATCH, "as long as it waits"
    scheduler.report(request)
    assert scheduler.side.build(STEP).pass_rows == 0


def test_one_without_stored_chunks_is_vllms(scheduler: Scheduler) -> None:
    request = scheduler.add("a", list(range(100, 160)), marks={})
    assert scheduler.schedule(request) == 0
    assert scheduler.side.finish(request) is None


def test_the_same_prompt_waits_until_the_blocks_of_the_first_are_cached(scheduler: Scheduler) -> None:
    first, second = scheduler.add("a"), scheduler.add("b")
    assert scheduler.schedule(first)
    assert scheduler.schedule(second) is None
    scheduler.report(first)
    assert scheduler.schedule(second) is None, "vLLM caches the blocks when it schedules the first"
    scheduler.compute(first)
    scheduler.side.allocate(first, ([0],), 0)
    assert scheduler.schedule(second) == 0
    assert scheduler.side.build(STEP).jobs[0].request_id == "a"


def test_it_does_not_wait_for_one_that_was_aborted(scheduler: Scheduler) -> None:
    first, second = scheduler.add("a"), scheduler.add("b")
    scheduler.schedule(first)
    scheduler.side.finish(first)
    assert scheduler.schedule(second) == len(PROMPT) - 1
    scheduler.report(first)  # of a pass that was under way
    scheduler.report(second)
    scheduler.side.build(STEP)
    scheduler.side.allocate(second, ([0],), 0)
    scheduler.side.finish(second)
    assert held(scheduler) == 0


def test_a_request_whose_blocks_no_pass_could_write_is_left_to_vllm(scheduler: Scheduler) -> None:
    request = scheduler.add("a")
    scheduler.schedule(request)
    scheduler.report(request, failure="no memory", unwritten=[0])
    assert scheduler.schedule(request) == 0


def test_a_next_turn_finds_the_blocks_of_prompt_and_answer(scheduler: Scheduler) -> None:
    scheduler.answer("a")
    told = scheduler.answer("b", PROMPT + ANSWER + QUESTION)
    assert told["continued"]
    assert told["prefix_cached_tokens"] == (len(PROMPT) + len(ANSWER) - 1) // BLOCK * BLOCK
    again = scheduler.answer("c", PROMPT + ANSWER + QUESTION + ANSWER + QUESTION)
    assert again["prefix_cached_tokens"] == (len(PROMPT + ANSWER + QUESTION) + len(ANSWER) - 1) // BLOCK * BLOCK


def test_a_turn_that_marks_nothing_continues_too(scheduler: Scheduler) -> None:
    """A framework may render earlier messages without marks, and the store may have lost the chunks."""
    scheduler.answer("a")
    scheduler.store.clear()
    told = scheduler.answer("b", PROMPT + ANSWER + QUESTION, marks={})
    assert (told["continued"], told["chunks"]) == (True, [])


def test_another_question_about_the_same_documents_continues(scheduler: Scheduler) -> None:
    scheduler.answer("a")
    told = scheduler.answer("b", PREFIX + A + B + list(range(200, 209)))
    assert (told["continued"], told["prefix_cached_tokens"]) == (True, len(PREFIX + A + B) // BLOCK * BLOCK)


def test_exact_blocks_come_first(scheduler: Scheduler) -> None:
    assert scheduler.answer("a", marks=False) is None
    told = scheduler.answer("b", PROMPT + ANSWER + QUESTION)
    assert not told["continued"]
    assert told["prefix_cached_tokens"] == (len(PROMPT) + len(ANSWER) - 1) // BLOCK * BLOCK


def test_other_documents_are_blended_anew(scheduler: Scheduler) -> None:
    scheduler.answer("a")
    request = scheduler.add("b", PREFIX + B + A + QUESTION, marks={"spans": [[5, 29], [29, 53]]})
    assert scheduler.schedule(request) == len(PROMPT) - 1 - EXACT


@pytest.mark.parametrize("marks", [{"policy": {"policy": "first"}}, False], ids=["policy", "plain"])
def test_blocks_that_were_computed_in_another_way_are_not_used(scheduler: Scheduler, marks: Any) -> None:
    scheduler.answer("a")
    request = scheduler.add("b", PROMPT + ANSWER + QUESTION,
                            marks and {"spans": [[5, 29], [29, 53]]} | marks)
    assert scheduler.cached(request) == EXACT


def test_what_was_evicted_is_blended_anew(scheduler: Scheduler) -> None:
    scheduler.answer("a")
    scheduler.pool.evict_blocks(set(range(200)))
    request = scheduler.add("b", PROMPT + ANSWER + QUESTION)
    assert scheduler.schedule(request) == len(PROMPT + ANSWER + QUESTION) - 1


def test_after_a_reset_nothing_is_continued(scheduler: Scheduler) -> None:
    scheduler.answer("a")
    scheduler.side._fingerprint.reset()
    request = scheduler.add("b", PROMPT + ANSWER + QUESTION)
    assert scheduler.cached(request) == EXACT


def test_conversations_can_be_blended_anew_always() -> None:
    scheduler = Scheduler(conversations="anew", policy="query")
    scheduler.answer("a")
    request = scheduler.add("b", PROMPT + ANSWER + QUESTION)
    assert scheduler.cached(request) == EXACT
    assert scheduler.schedule(request) == len(PROMPT + ANSWER + QUESTION) - 1 - EXACT
    scheduler.store.close()


@pytest.fixture
def reading() -> Iterator[Scheduler]:
    """Its passes can read the paged cache."""
    made = Scheduler(reads_cache=True)
    yield made
    made.store.close()


TURN = [[5, 29], [len(PREFIX + A + QUESTION + ANSWER), len(PREFIX + A + QUESTION + ANSWER + C)]]


def test_documents_of_a_later_turn_are_blended_behind_what_is_cached(reading: Scheduler) -> None:
    first = PREFIX + A + QUESTION
    reading.answer("a", first, marks={"spans": TURN[:1]})
    second = first + ANSWER + C + QUESTION
    request = reading.add("b", second, marks={"spans": TURN})
    cached = (len(first) + len(ANSWER) - 1) // BLOCK * BLOCK
    assert (reading.cached(request), reading.schedule(request)) == (cached, len(second) - 1 - cached)
    [job] = reading.side.build(STEP).jobs
    assert job.write_from == cached
    reading.report(request, cached=cached, reused=20)
    reading.compute(request, ANSWER)
    told = reading.side.finish(request)[BLEND_PARAMS_KEY]
    assert (told["continued"], [chunk["reason"] for chunk in told["chunks"]]) == (True, ["prefix cached", ""])
    third = reading.answer("c", second + ANSWER + QUESTION, marks={"spans": TURN})
    assert third["prefix_cached_tokens"] == (len(second) + len(ANSWER) - 1) // BLOCK * BLOCK


def test_exact_blocks_are_read_however_far_they_reach(reading: Scheduler) -> None:
    """A chunk that vLLM has prefilled at this place, and further ones that it has not."""
    reading.answer("a", PREFIX + A + QUESTION, marks=False)
    request = reading.add("b")
    exact = len(PREFIX + A) // BLOCK * BLOCK
    assert (reading.cached(request), reading.schedule(request)) == (exact, len(PROMPT) - 1 - exact)


def test_where_the_cache_cannot_be_read_a_pass_computes_what_it_holds(scheduler: Scheduler) -> None:
    scheduler.answer("a", PREFIX + A + QUESTION, marks=False)
    prompt = PREFIX + A + C + QUESTION
    request = scheduler.add("b", prompt, marks={"spans": [[5, 29], [29, 129]]})
    assert (scheduler.cached(request), scheduler.schedule(request)) == (EXACT, len(prompt) - 1 - EXACT)


def test_nothing_is_held_when_all_have_ended(scheduler: Scheduler) -> None:
    for number in range(3):
        scheduler.answer(f"request {number}", PROMPT + ANSWER * number)
    assert held(scheduler) == 0
