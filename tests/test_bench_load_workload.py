"""The sequences of requests that `bench serve` sends have the distribution that their parameters say."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from blendrag.bench.load.workload import Request, Shape, Workload
from blendrag.errors import ConfigError

CHAT = Workload(Shape.CHAT, requests=300, documents=200, per_request=5, seed=3)


def popularity(requests: list[Request]) -> Counter[int]:
    return Counter(document for request in requests for document in request.documents)


@pytest.mark.parametrize("shape", Shape)
def test_a_seed_gives_one_sequence(shape: Shape) -> None:
    workload = Workload(shape, requests=50)
    assert workload.arrange() == workload.arrange()
    assert workload.arrange() != replace(workload, seed=1).arrange()


@pytest.mark.parametrize("shape", Shape)
def test_arrivals_are_a_poisson_process_of_one_request_a_second(shape: Shape) -> None:
    arrivals = [request.arrival for request in Workload(shape, requests=2000).arrange()]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert sum(gaps) / len(gaps) == pytest.approx(1, rel=0.1)
    assert sum(gap < 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.095, abs=0.03)  # 1 - exp(-0.1)


def test_rag_requests_are_random_subsets_in_random_order() -> None:
    requests = Workload(Shape.RAG, requests=400, documents=20, zipf=0, per_request=6).arrange()
    assert all(len(set(request.documents)) == 6 for request in requests)
    counts = popularity(requests)
    assert sorted(counts) == list(range(20))
    assert max(counts.values()) < 1.4 * min(counts.values())
    ascending = sum(request.documents[0] < request.documents[1] for request in requests)
    assert ascending / len(requests) == pytest.approx(0.5, abs=0.1)


def test_popular_documents_come_often_and_at_any_place() -> None:
    requests = Workload(Shape.RAG, requests=400, documents=50, zipf=1.2, per_request=4).arrange()
    counts = popularity(requests)
    assert counts[0] > 2 * counts[5] > 4 * counts[45]
    places = [request.documents.index(0) for request in requests if 0 in request.documents]
    assert sum(places) / len(places) == pytest.approx(1.5, abs=0.2)


def test_permute_requests_hold_the_whole_pool_in_new_orders() -> None:
    requests = Workload(Shape.PERMUTE, requests=20, documents=6).arrange()
    assert all(sorted(request.documents) == list(range(6)) for request in requests)
    assert len({request.documents for request in requests}) > 15


def test_chat_documents_were_seen_before_or_repeat_as_often_as_wanted() -> None:
    retrieved: set[int] = set(range(CHAT.documents))
    earlier: dict[int, set[int]] = defaultdict(set)
    seen = repeated = total = 0
    for request in CHAT.arrange():
        assert len(set(request.documents)) == CHAT.per_request
        seen += sum(document in retrieved for document in request.documents)
        repeated += sum(document in earlier[request.conversation] for document in request.documents)
        total += len(request.documents)
        retrieved.update(request.documents)
        earlier[request.conversation].update(request.documents)
    assert seen / total == pytest.approx(0.43, abs=0.01)
    assert repeated / total == pytest.approx(0.21, abs=0.01)


def test_conversations_have_one_to_eight_turns_in_order_and_overlap() -> None:
    turns: dict[int, list[int]] = defaultdict(list)
    places: dict[int, list[int]] = defaultdict(list)
    for request in CHAT.arrange():
        turns[request.conversation].append(request.turn)
        places[request.conversation].append(request.number)
    assert all(found == list(range(len(found))) for found in turns.values())
    assert set(map(len, turns.values())) == set(range(1, 9))
    assert any(found[-1] - found[0] > len(found) for found in places.values())


@pytest.mark.parametrize(("workload", "message"), [
    ({"documents": 4, "per_request": 5}, "make the pool larger"),
    ({"shape": Shape.CHAT, "seen": 0.1, "repeated": 0.2}, "lower the first or raise the second"),
])
def test_parameters_that_contradict_each_other_are_refused(workload: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**workload)  # type: ignore[arg-type]
