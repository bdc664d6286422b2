"""Chunks that requests bring along are stored, off the requests' path, each once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams, mark_chunks
from blendrag.errors import PromptError
from blendrag.requests import RequestOptions
from blendrag.runtime.compat import scheduler_connector
from blendrag.runtime.passes.lanes import EncodeLane
from tests.engine.families import FAMILIES, build
from tests.engine.test_reuse import fresh
from tests.engine.texts import QUESTION
from tests.helpers import make_request

ROWS, STEP = 256, 64
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(next(family for family in FAMILIES if family.name == "Llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(engine_pool: Any, tiny: Path) -> BlendEngine:
    return engine_pool.get(  # type: ignore[no-any-return]
        tiny, config=BlendConfig(populate="on_miss", populate_step_tokens=STEP), dtype="float32", enforce_eager=True,
        max_model_len=1024, kv_cache_memory_bytes=2**26, max_num_batched_tokens=ROWS, max_num_seqs=16)


def prompt(*chunks: str) -> BlendPrompt:
    return BlendPrompt("Read. ", *map(Chunk, chunks), QUESTION)


def watch(engine: BlendEngine) -> list[list[int]]:
    """Every chunk that the worker is asked to encode, as token ids; from now on."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    asked: list[list[int]] = []

    def listen(_: Any) -> None:
        populating: Any = get_kv_transfer_group().worker.populating
        advance = type(populating).advance.__get__(populating)

        def watched(missing: list[Any], sink_ids: list[int], rows: int) -> Any:
            asked.extend(chunk.ids for chunk in missing if not chunk.is_prefix)
            return advance(missing, sink_ids, rows)

        populating.advance = watched

    engine._start().call(listen)
    return asked


def test_a_chunk_is_there_for_the_next_request(engine: BlendEngine) -> None:
    first, second = fresh("a"), fresh("b")
    [cold] = engine.generate(prompt(first, second), SHORT)
    assert [chunk.reason for chunk in cold.stats.chunks] == ["not stored", "not stored"]
    engine.flush()
    assert engine.stored([first, second]) == [True, True]
    [warm] = engine.generate(prompt(second, first), SHORT)
    assert warm.stats.chunks_reused == 2


@pytest.mark.parametrize("known", [[], ["known"]], ids=["nothing is reused", "beside a reused chunk"])
def test_what_requests_bring_is_stored_whole_and_as_if_it_stood_alone(engine: BlendEngine, known: list[str]) -> None:
    """vLLM computes the prompt in several steps, the chunks behind others: nothing of that is in the entries."""
    texts, new = list(map(fresh, known)), [fresh("a"), fresh("b"), fresh("c")]
    engine.encode(texts)
    [output] = engine.generate(prompt(*texts, *new), SHORT)
    assert [chunk.reused for chunk in output.stats.chunks] == [True] * len(texts) + [False] * 3
    assert len(output.prompt_token_ids) > ROWS
    engine.flush()
    for text in new:
        [brought] = engine.encode([text])
        found = engine.store.get(brought.key)
        assert engine.store.delete(brought.key)
        [alone] = engine.encode([text])
        assert (brought.new, alone.new, alone.key) == (False, True, brought.key)
        expected = engine.store.get(alone.key)
        assert found is not None
        assert expected is not None
        torch.testing.assert_close((found.k, found.v), (expected.k, expected.v), rtol=1e-4, atol=1e-4)


def test_marks_in_text_make_chunks_too(engine: BlendEngine) -> None:
    text = fresh()
    engine.generate(f"Read. {mark_chunks([text])} What is it?", SHORT)
    engine.flush()
    assert engine.stored([text]) == [True]


def test_the_first_token_does_not_wait(engine: BlendEngine) -> None:
    """It is handed out before the first chunk is encoded, and other requests' prompts go first too."""
    order: list[str] = []
    text = fresh()
    asked = watch(engine)
    stream = engine.stream(prompt(text), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    order.append("token")
    engine._start().call(lambda _: order.append("encoded" if asked else "not encoded"))
    stream.close()
    engine.flush()
    assert order[0] == "token"
    assert len(asked) == 1
    assert engine.stored([text]) == [True]


def test_many_requests_with_the_same_new_chunk_have_it_encoded_once(engine: BlendEngine) -> None:
    text = fresh()
    asked = watch(engine)
    held = threading.Event()
    holding = threading.Thread(target=engine._start().call, args=(lambda _: held.wait(),))
    holding.start()
    tickets = engine._submit([prompt(text)] * 5, [SHORT] * 5, RequestOptions())
    held.set()
    holding.join()
    outputs = [list(ticket)[-1] for ticket in tickets]
    engine.flush()
    assert all(output.finished for output in outputs)
    assert len(asked) == 1


def test_a_chunk_that_was_encoded_meanwhile_is_not_encoded_again(engine: BlendEngine) -> None:
    text = fresh()
    asked = watch(engine)
    stream = engine.stream(prompt(text), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    engine.encode([text])
    list(stream)
    engine.flush()
    assert asked == []


def test_an_aborted_request_loses_nothing(engine: BlendEngine) -> None:
    text = fresh()
    stream = engine.stream(prompt(text), SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    engine.flush()
    assert engine.stored([text]) == [True]


def test_what_cannot_be_encoded_is_not_tried_for_ever(engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    text = fresh()
    encoder: Any = engine._start().call(lambda _: get_kv_transfer_group().worker.populating.encoder)
    lane, failures = encoder.lane, []

    def fail(*_: Any, **__: Any) -> None:
        failures.append(1)
        raise RuntimeError("no kernel")

    encoder.lane = fail
    try:
        [output] = engine.generate(prompt(text), SHORT)
        engine.flush()
    finally:
        encoder.lane = lane
    assert (len(output.token_ids), len(failures)) == (3, 1)
    assert engine.stored([text]) == [False]
    assert "1 chunks of requests could not be stored: no kernel" in caplog.text


def test_a_prefix_that_comes_again_is_stored_too(engine: BlendEngine) -> None:
    system = fresh("You answer from the passages alone.") * 3
    asked = [BlendPrompt(system, Chunk(fresh()), QUESTION) for _ in range(3)]
    rows = []
    for question in (asked[0], asked[0], asked[1], asked[2], asked[2]):
        engine._start().call(lambda vllm: vllm.reset_prefix_cache())
        [output] = engine.generate(question, SHORT, policy="none")
        engine.flush()
        rows.append(output.stats.rows)
    assert rows[1] > 0.5, "the chunk is reused, the prefix computed"
    assert rows[4] < 0.3, "both are stored"


def test_a_long_chunk_is_encoded_in_pieces_between_a_neighbours_tokens_as_if_in_one(engine: BlendEngine) -> None:
    text = fresh() * 5
    pieces: list[int] = []

    def watch_rows(_: Any) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        forward: Any = get_kv_transfer_group().worker.populating.encoder.forward
        run_tile = type(forward).run_tile.__get__(forward)

        def watched(tile: list[Any]) -> None:
            pieces.extend(part.rows.stop - part.rows.start for lane, part in tile if isinstance(lane, EncodeLane))
            run_tile(tile)

        forward.run_tile = watched
        return forward

    forward = engine._start().call(watch_rows)
    neighbour = engine.stream("Go on.", SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
    next(neighbour)
    engine.generate(prompt(text), SHORT)
    while not engine.stored([text])[0]:
        next(neighbour)
    neighbour.close()
    del forward.run_tile
    [brought] = engine.encode([text])
    length = brought.tokens
    assert sum(pieces) - length <= 1, "and the sink"
    assert max(pieces) <= STEP < length
    found = engine.store.get(brought.key)
    engine.forget([text])
    [whole] = engine.encode([text])
    expected = engine.store.get(whole.key)
    assert (brought.new, whole.new, whole.key) == (False, True, brought.key)
    torch.testing.assert_close((found.k, found.v), (expected.k, expected.v), rtol=1e-4, atol=1e-4)


def test_a_document_that_the_model_has_no_positions_for_is_not_encoded(engine: BlendEngine) -> None:
    """Its edges may be missing in the prompt, so it may be longer than the longest prompt."""
    limit = engine.max_model_len
    words = engine.tokens.chunk_ids(fresh() * 30)
    document = words[: limit + 4]
    prompt_ids = document[7 : 7 + limit - 4]

    def ask(vllm: Any) -> None:
        planner = scheduler_connector(vllm).scheduler.planner
        plan = planner.plan(make_request(prompt_ids), documents=[np.array(document, np.int64)])
        assert [chunk.reason for chunk in plan.stats.chunks] == ["not stored"]
        assert [len(missing.ids) for missing in plan.missing] == [limit + 4]
        scheduler_connector(vllm).scheduler.populator.add(make_request([1]), plan.missing)
        assert not scheduler_connector(vllm).scheduler.populator._chunks

    engine._start().call(ask)
    with pytest.raises(PromptError, match=f"the model takes {limit}"):
        engine._rpc("blendrag_encode", "default", [document], engine.tokens.sink_ids, True)


def test_what_comes_with_a_cache_salt_is_found_with_it_alone(engine: BlendEngine) -> None:
    shared, ours = fresh("a"), fresh("b")
    engine.encode([shared])
    [output] = engine.generate(prompt(shared, ours), SHORT, cache_salt="ours")
    assert [chunk.reason for chunk in output.stats.chunks] == ["", "not stored"]
    engine.flush()
    assert engine.stored([shared, ours]) == [True, False]
    assert engine.stored([shared, ours], cache_salt="ours") == [False, True]
    assert engine.stored([shared, ours], cache_salt="theirs") == [False, False]
    for salt, reused in ((None, [True, False]), ("theirs", [True, False]), ("ours", [True, True])):
        engine.reset_prefix_cache()
        marked = engine.generate(prompt(shared, ours), SHORT, cache_salt=salt)[0].stats
        assert [chunk.reused for chunk in marked.chunks] == reused
        engine.flush()
        for brought in (None, "theirs"):
            engine.forget([ours], cache_salt=brought)
    unmarked = engine.generate(f"Read. {ours} What is it?", SHORT, cache_salt="theirs")[0].stats
    assert unmarked.chunks == []
    assert engine.generate(f"Read. {ours} What is it?", SHORT, cache_salt="ours")[0].stats.chunks_reused == 1
    assert engine.forget([ours], cache_salt="ours") == 1


def test_nothing_is_stored_unasked(engine_pool: Any, tiny: Path) -> None:
    engine = engine_pool.get(tiny, dtype="float32", enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=2**26)
    text = fresh()
    engine.generate(prompt(text), SHORT)
    engine.flush()
    assert engine.stored([text]) == [False]
