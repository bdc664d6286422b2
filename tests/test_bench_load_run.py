"""A load is sent when it is due, whatever the answers do; the client here answers from memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from blendrag.bench.load.clients import Client, Usage
from blendrag.bench.load.figures import Ledger
from blendrag.bench.load.run import NEIGHBOUR_TOKENS, Load, Run, Traffic, run
from blendrag.bench.load.workload import Request
from blendrag.errors import BlendError
from blendrag.prompt import BlendPrompt

FAST = Load(rate=1e6)


class Memory:
    """Answers at once, a token for each turn of the event loop; notes what it was asked."""

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.stored: list[str] = []
        self.under_way = self.most = self.resets = 0
        self._failing = failing

    async def store(self, documents: Sequence[str], prefix: str, anywhere: bool, at_once: int) -> None:
        self.stored += documents

    async def reset(self) -> None:
        self.resets += 1

    async def stream(self, prompt: BlendPrompt, output_tokens: int) -> AsyncGenerator[Usage | None, None]:
        self.asked.append(prompt.text)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(output_tokens):
                await asyncio.sleep(0)
                if prompt.text in self._failing:
                    raise BlendError(f"{prompt.text} is refused")
                yield None
            yield Usage(10, 4, 3, output_tokens)
        finally:
            self.under_way -= 1
            self.ended.append(prompt.text)

    async def reused_tokens(self) -> int | None:
        return None


def traffic(conversations: Sequence[int], neighbours: int = 0, probe_rate: float = 0) -> Traffic:
    requests = [Request(number, 0.5 * number, (), conversation) for number, conversation in enumerate(conversations)]
    return Traffic(requests, [BlendPrompt(f"request {request.number}") for request in requests], 6, BlendPrompt,
                   neighbours, probe_rate)


def send(client: Client, load: Load, what: Traffic) -> Run:
    return asyncio.run(run(client, what, load))


def test_every_request_is_answered_and_the_prefix_cache_is_empty_before() -> None:
    client = Memory()
    found = send(client, FAST, traffic(range(5)))
    assert client.resets == 1
    assert client.asked == [f"request {number}" for number in range(5)]
    assert [reply.number for reply in found.replies] == list(range(5))
    assert all(len(reply.moments) == 6 and reply.usage for reply in found.replies)
    assert Ledger.of([reply.usage for reply in found.replies if reply.usage]) == Ledger(50, 30, 5, 15)


def test_open_arrivals_do_not_wait_for_answers_and_closed_ones_do() -> None:
    everything, few = Memory(), Memory()
    send(everything, FAST, traffic(range(8)))
    send(few, Load(in_flight=2), traffic(range(8)))
    assert everything.most == 8
    assert few.most == 2


@pytest.mark.parametrize("load", [FAST, Load(in_flight=3)], ids=["open", "closed"])
def test_a_turn_waits_for_the_answer_before_it(load: Load) -> None:
    client = Memory()
    found = send(client, load, traffic([0, 0, 1, 0, 1]))
    first, second, _, third, _ = found.replies
    assert first.moments[-1] <= second.sent < second.moments[-1] <= third.sent


def test_streams_decode_beside_the_requests_from_the_first_to_the_last() -> None:
    client = Memory()
    found = send(client, FAST, traffic(range(3), neighbours=2))
    assert sorted(client.asked[:2]) == ["neighbour 0 0", "neighbour 1 0"]
    assert 10 < len(found.gaps) < 2 * NEIGHBOUR_TOKENS
    assert sorted(client.ended[-2:]) == ["neighbour 0 0", "neighbour 1 0"]
    assert client.under_way == 0


def test_probes_are_sent_beside_the_requests_and_answered() -> None:
    client = Memory()
    found = send(client, FAST, traffic([0] * 50, probe_rate=1e6))
    assert found.probes
    assert all(len(reply.moments) == 1 for reply in found.probes)
    assert client.under_way == 0


def test_a_request_that_fails_says_so_and_the_others_go_on() -> None:
    found = send(Memory(failing=["request 1"]), FAST, traffic(range(3)))
    assert [reply.failure for reply in found.replies] == ["", "request 1 is refused", ""]


def test_nothing_but_failures_is_an_error() -> None:
    with pytest.raises(BlendError, match="every request failed, the first one: request 0 is refused"):
        send(Memory(failing=["request 0", "request 1"]), FAST, traffic(range(2)))


def test_a_decoding_stream_that_fails_is_an_error() -> None:
    client = Memory(failing=["neighbour 0 0"])
    with pytest.raises(BlendError, match="neighbour 0 0 is refused"):
        send(client, FAST, traffic(range(2), neighbours=1))
    assert client.asked == ["neighbour 0 0"]
