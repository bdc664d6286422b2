"""A whole measurement of a load: what is stored before, what is sent by both arms, what comes out; no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from blendrag.bench.load.clients import Client
from blendrag.bench.load.figures import Figures, Goal
from blendrag.bench.load.measure import LoadPlan, measure_load, measure_turns
from blendrag.bench.load.prompts import Lengths
from blendrag.bench.load.run import NEIGHBOUR_TOKENS, Load
from blendrag.bench.load.target import ARMS, Target
from blendrag.bench.load.turns import Conversations, Style
from blendrag.bench.load.workload import Shape, Workload
from tests.test_bench_load_run import Memory

LENGTHS = Lengths(document=16, system=8, question=6, answer=2)
PLAN = LoadPlan(Workload(requests=4, documents=5, per_request=2), LENGTHS, [Load(rate=1e6), Load(in_flight=1)], Goal(),
                quiet_s=0)


@dataclass(frozen=True)
class InMemory(Target):
    """Clients that answer from memory."""

    clients: Mapping[str, Memory] = field(default_factory=lambda: {arm: Memory() for arm in ARMS})
    lengths: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, max_model_len: int) -> AsyncIterator[Mapping[str, Client]]:
        self.lengths.append(max_model_len)
        yield dict(self.clients)


@pytest.fixture
def target(smollm2: Path) -> InMemory:
    return InMemory(str(smollm2))


def measured(target: InMemory, plan: LoadPlan) -> list[Figures]:
    return asyncio.run(measure_load(target, plan, lambda *_: None))


def test_both_arms_send_the_same_prompts_under_every_load(target: InMemory, tmp_path: Path) -> None:
    plan = replace(PLAN, export=tmp_path / "prompts.jsonl")
    figures = measured(target, plan)
    assert [(figure.load, figure.arm) for figure in figures] == [
        (load, arm) for load in ("1e+06/s", "1 in flight") for arm in ("plain", "blended")]
    plain, blended = (target.clients[arm] for arm in ARMS)
    assert plain.asked == blended.asked
    assert len(blended.stored) == plan.workload.documents
    exported = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in exported] == plain.asked[-4:]
    assert {line["output_tokens"] for line in exported} == {LENGTHS.answer}


def test_new_documents_of_conversations_are_new_under_every_load(target: InMemory) -> None:
    workload = Workload(Shape.CHAT, requests=4, documents=5, per_request=2, seen=0, repeated=0)
    measured(target, replace(PLAN, workload=workload))
    first, second = (target.clients["plain"].asked[at : at + 4] for at in (-8, -4))
    assert not set(first) & set(second)


def test_a_cold_load_stores_nothing_before(target: InMemory) -> None:
    measured(target, replace(PLAN, cold=True))
    assert not target.clients["blended"].stored


def test_the_model_takes_the_longest_prompt_and_what_a_decoding_stream_writes(target: InMemory) -> None:
    measured(target, PLAN)
    measured(target, replace(PLAN, neighbours=1))
    alone, beside = target.lengths
    assert 2 * LENGTHS.document < alone < 200
    assert beside > NEIGHBOUR_TOKENS


def test_conversations_of_each_style_are_held_by_both_arms(target: InMemory) -> None:
    conversations = Conversations(count=2, turns=2, per_turn=1, pool=3)
    figures = asyncio.run(measure_turns(target, conversations, list(Style), LENGTHS, [], lambda *_: None))
    assert [(figure.style, figure.turn) for figure in figures] == [
        (style, turn) for style in Style for turn in (1, 2, None)]
    assert all(figure.computed == {"plain": 0.6, "blended": 0.6} for figure in figures)
    assert sorted(target.clients["plain"].asked) == sorted(target.clients["blended"].asked)
