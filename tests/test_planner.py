"""The scheduler side plans which stored chunks a request reuses, and says afterwards what became of it."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams

from blendrag.blend_params import read_blend_params
from blendrag.config import BlendConfig
from blendrag.errors import ConfigError, PromptError
from blendrag.policies import CacheBlend, First, Full, NoRecompute, Policy, Query
from blendrag.runtime.messages import BlendReport, Missing, ModelFacts, Placement
from blendrag.runtime.planning.locating import DocumentTokens, as_ids
from blendrag.runtime.planning.planner import Planner
from blendrag.runtime.planning.scope import scope_of
from blendrag.stats import BlendStats, ChunkStats
from blendrag.store import ChunkStore, KVEntry, entry_key, prefix_digest
from blendrag.store.keys import NEUTRAL, rank_keys
from tests.helpers import make_request

LAYERS = 4
PREFIX, QUESTION = list(range(100, 105)), list(range(900, 912))
A, B, C = list(range(200, 220)), list(range(300, 330)), list(range(400, 416))
PROMPT = PREFIX + A + B + QUESTION
SPAN_A, SPAN_B = (5, 25), (25, 55)


def make_planner(**config) -> Planner:
    planner = Planner(BlendConfig(**({"policy": "none"} | config)), ChunkStore())
    planner.know(ModelFacts("model", LAYERS))
    return planner


@pytest.fixture
def planner():
    planner = make_planner()
    yield planner
    planner.lookup.store.close()


def put(planner, ids, digest=NEUTRAL, fingerprint="model", namespace="default", findable=False) -> str:
    """Stores a chunk: as the neutral variant, or behind the prefix of a digest; findable without marks or not."""
    key = entry_key(fingerprint, namespace, digest, ids)
    kv = torch.zeros(LAYERS, len(ids), 1, 2)
    known = {"prefix": digest, "ids": ids} if findable else {}
    planner.lookup.store.put(key, KVEntry(kv, kv), fingerprint=fingerprint, namespace=namespace, **known)
    return key


def find(planner, digest=NEUTRAL, *chunks) -> list[str]:
    return [put(planner, ids, digest, findable=True) for ids in chunks]


def plan_of(planner, ids=PROMPT, spans=(SPAN_A, SPAN_B), policy=None, **options):
    return planner.plan(make_request(list(ids), **options), [list(span) for span in spans], policy)


def chunks_of(plan):
    """Of a request that may be blended: reused, exact and the reason of each chunk."""
    return [(chunk.reused, chunk.exact, chunk.reason) for chunk in plan.stats.chunks]


# Which entry stands in.


def test_stored_chunks_are_placed_where_the_prompt_marks_them(planner):
    a, b = put(planner, A), put(planner, B)
    plan = plan_of(planner)
    assert plan.placements == [Placement(5, 25, a, False), Placement(25, 55, b, False)]
    assert [(chunk.start, chunk.tokens) for chunk in plan.stats.chunks] == [(5, 20), (25, 30)]
    assert chunks_of(plan) == [(True, False, "")] * 2
    assert (plan.stats.policy, plan.stats.prompt_tokens) == ("none", len(PROMPT))


def test_a_chunk_that_is_not_stored_does_not_keep_the_others_from_being_reused(planner):
    b = put(planner, B)
    plan = plan_of(planner)
    assert chunks_of(plan) == [(False, False, "not stored"), (True, False, "")]
    assert plan.placements == [Placement(25, 55, b, False)]


def test_the_variant_behind_the_prompts_own_prefix_is_preferred(planner):
    behind = prefix_digest(PREFIX)
    put(planner, A), put(planner, B)
    a, b = put(planner, A, behind), put(planner, B, behind)
    plan = plan_of(planner)
    assert [placement.key for placement in plan.placements] == [a, b]
    # Only the first chunk stands behind the very tokens it was encoded behind.
    assert chunks_of(plan) == [(True, True, ""), (True, False, "")]


def test_the_variant_of_another_prefix_is_not_used(planner):
    put(planner, A, prefix_digest([1, 2, 3])), put(planner, A, prefix_digest())
    assert chunks_of(plan_of(planner))[0] == (False, False, "not stored")


def test_a_neutral_first_chunk_is_not_exact_even_where_nothing_precedes_it(planner):
    put(planner, A)
    plan = plan_of(planner, A + QUESTION, [(0, 20)])
    assert (chunks_of(plan), plan.exact_tokens) == ([(True, False, "")], 0)


def test_a_first_chunk_encoded_as_a_prompts_beginning_is_exact(planner):
    a = put(planner, A, prefix_digest())
    plan = plan_of(planner, A + QUESTION, [(0, 20)])
    assert plan.placements == [Placement(0, 20, a, True)]
    assert plan.exact_tokens == len(A + QUESTION)


def test_the_stored_prefix_stands_in_for_the_text_before_the_first_chunk(planner):
    prefix, a = put(planner, PREFIX, prefix_digest()), put(planner, A, prefix_digest(PREFIX))
    plan = plan_of(planner)
    assert plan.placements == [Placement(0, 5, prefix, True), Placement(5, 25, a, True)]


def test_a_stored_prefix_alone_is_no_reason_to_blend(planner):
    put(planner, PREFIX, prefix_digest())
    plan = plan_of(planner)
    assert (plan.placements, plan.salt) == ([], b"")


@pytest.mark.parametrize("other", [{"fingerprint": "other-model"}, {"namespace": "other"}])
def test_chunks_of_other_models_and_namespaces_are_not_found(planner, other):
    put(planner, A, **other)
    assert plan_of(planner).placements == []


def test_chunks_too_short_to_be_stored_are_not_looked_up():
    planner = make_planner(min_chunk_tokens=21)
    put(planner, A), put(planner, B)
    assert chunks_of(plan_of(planner)) == [(False, False, "too short"), (True, False, "")]


def test_the_same_chunk_twice_is_placed_twice(planner):
    a = put(planner, A)
    plan = plan_of(planner, PREFIX + A + A + QUESTION, [(5, 25), (25, 45)])
    assert plan.placements == [Placement(5, 25, a, False), Placement(25, 45, a, False)]
    lost = planner.conclude(plan, BlendReport(damaged=[a]))
    assert [chunk.reason for chunk in lost.chunks] == ["damaged", "damaged"]


def test_the_last_token_is_left_to_vllm(planner):
    a = put(planner, A)
    plan = plan_of(planner, PREFIX + A, [SPAN_A])
    assert plan.placements == [Placement(5, 24, a, False)]


def test_a_chunk_of_which_only_the_last_token_is_left_is_not_reused():
    planner = make_planner(min_chunk_tokens=1)
    put(planner, [7])
    plan = plan_of(planner, [*PREFIX, 7], [(5, 6)])
    assert plan.placements == []
    assert not plan.stats.chunks[0].reused


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from([NEUTRAL, prefix_digest(PREFIX),
                                                                     prefix_digest(PREFIX + A), prefix_digest([1])]),
                          st.sampled_from([None, "salt"]))), st.sampled_from([None, "salt"]))
def test_the_same_entries_are_placed_whether_or_not_the_content_index_knows_them(stored, salt):
    plans = []
    for findable in (True, False):
        planner = make_planner()
        for ids, digest, of in stored:
            put(planner, ids, digest, namespace=scope_of(planner.config, of), findable=findable)
        plans.append(plan_of(planner, cache_salt=salt))
    assert plans[0].placements == plans[1].placements
    assert chunks_of(plans[0]) == chunks_of(plans[1])


def test_a_stored_prefix_serves_a_chunk_that_begins_the_prompt(planner):
    find(planner, NEUTRAL, A)
    prefix = put(planner, A, prefix_digest())
    assert plan_of(planner, A + QUESTION, [(0, 20)]).placements == [Placement(0, 20, prefix, True)]


# Documents are marked by their text: their tokens are looked for in the prompt.


def plan_with_documents(planner, ids, *documents, spans=()):
    found = [np.array(document, np.int64) for document in documents]
    return planner.plan(make_request(list(ids)), spans, documents=found)


@pytest.mark.parametrize("match", [True, False])
def test_documents_are_placed_where_they_stand_in_the_prompt(match):
    planner = make_planner(match=match)
    [a] = find(planner, NEUTRAL, A)
    plan = plan_with_documents(planner, PROMPT, B, A)
    assert plan.placements == [Placement(5, 25, a, False)]
    assert [(chunk.start, chunk.tokens, chunk.reason) for chunk in plan.stats.chunks] == [
        (5, 20, ""), (25, 30, "not stored")]
    assert plan.missing == [Missing(B, False, "default")]


@pytest.mark.parametrize("match", [True, False])
def test_a_document_is_stored_whole_and_used_without_the_tokens_that_merged_with_others(match):
    planner = make_planner(match=match)
    merged = [*PREFIX, 7, *B[2:-1], 8, *QUESTION]
    assert plan_with_documents(planner, merged, B).missing == [Missing(B, False, "default")]
    [b] = find(planner, prefix_digest(PREFIX), B)
    plan = plan_with_documents(planner, merged, B)
    assert plan.placements == []
    [b] = find(planner, NEUTRAL, B)
    plan = plan_with_documents(planner, merged, B)
    assert plan.placements == [Placement(6, 33, b, False, 2)]
    assert chunks_of(plan) == [(True, False, "")]


def test_a_document_behind_the_very_tokens_it_was_encoded_behind_is_exact(planner):
    [a] = find(planner, prefix_digest(PREFIX), A)
    plan = plan_with_documents(planner, PROMPT, A)
    assert (plan.placements, plan.exact_tokens) == ([Placement(5, 25, a, True)], len(PROMPT))


def test_documents_that_are_not_in_the_prompt_are_told(planner):
    plan = plan_with_documents(planner, PROMPT, C)
    assert plan.stats.chunks == [ChunkStats(-1, len(C), reason="not in the prompt")]
    assert (plan.placements, plan.missing) == ([], [])
    put(planner, A)
    plan = plan_with_documents(planner, PROMPT, C, A)
    assert [(chunk.start, chunk.reused) for chunk in plan.stats.chunks] == [(5, True), (-1, False)]
    assert plan.question_start == 25
    assert planner.conclude(plan, BlendReport(reused=20)).chunks_reused == 1
    assert f'"{plan.stats.chunks[-1].reason}"' in ChunkStats.__doc__


def test_spans_and_documents_do_not_overlap(planner):
    put(planner, A)
    plan = plan_with_documents(planner, PROMPT, A, B, spans=[SPAN_A])
    assert [(chunk.start, chunk.reused) for chunk in plan.stats.chunks] == [(5, True), (25, False), (-1, False)]


@pytest.mark.parametrize("ids", [[1.5], ["a"], [None], [[1]], [2**40], [-1], [2**32 - 1]], ids=ascii)
def test_numbers_that_are_no_token_ids_of_documents_reuse_nothing(planner, ids):
    params = read_blend_params({"document_ids": [ids]})
    plan = planner.plan(make_request(PROMPT), documents=map(as_ids, params.document_ids))
    assert plan is None or (plan.placements, chunks_of(plan)) == ([], [(False, False, "not in the prompt")])


def test_documents_that_make_no_sense_end_in_a_full_prefill_not_in_an_error(planner):
    def broken():
        yield np.array(A)
        raise PromptError("no text")

    assert planner.plan(make_request(PROMPT), documents=broken()) is None
    assert planner.plan(make_request(PROMPT), documents=DocumentTokens(None)(7, np.array(PROMPT))) is None


# Without marks, chunks are found by their tokens.


def plan_without_marks(planner, ids):
    return planner.plan(make_request(list(ids)))


def test_stored_chunks_are_found_wherever_they_are(planner):
    a, b = find(planner, NEUTRAL, A, B)
    plan = plan_without_marks(planner, PREFIX + B + [1, 2, 3] + A + QUESTION)
    assert plan.placements == [Placement(5, 35, b, False), Placement(38, 58, a, False)]
    assert [(chunk.start, chunk.tokens, chunk.reused) for chunk in plan.stats.chunks] == [(5, 30, True), (38, 20, True)]
    assert (plan.question_start, plan.exact_tokens, len(plan.salt)) == (58, 5, 16)


def test_marks_and_no_marks_make_the_same_plan(planner):
    find(planner, NEUTRAL, A, B)
    marked, found = plan_of(planner), plan_without_marks(planner, PROMPT)
    assert (marked.placements, marked.salt) == (found.placements, found.salt)


def test_chunks_that_are_not_marked_are_found_beside_marked_ones(planner):
    a, b = find(planner, NEUTRAL, A, B)
    plan = plan_of(planner, PREFIX + A + [1] + B + QUESTION, [(26, 56)])
    assert [placement.key for placement in plan.placements] == [a, b]
    assert [chunk.start for chunk in plan.stats.chunks] == [5, 26]


def test_a_marked_chunk_is_not_found_twice(planner):
    [a] = find(planner, NEUTRAL, A)
    plan = plan_of(planner, PREFIX + A + QUESTION, [(5, 25)])
    assert plan.placements == [Placement(5, 25, a, False)]
    assert len(plan.stats.chunks) == 1


def test_what_is_stored_of_a_marked_chunk_is_used_where_the_whole_is_not(planner):
    [a] = find(planner, NEUTRAL, A)
    plan = plan_of(planner, PREFIX + A + B + QUESTION, [(5, 55)])
    assert plan.placements == [Placement(5, 25, a, False)]
    assert [(chunk.tokens, chunk.reason) for chunk in plan.stats.chunks] == [(50, "not stored"), (20, "")]
    assert plan.missing == [Missing(A + B, False, "default")]


def test_edges_that_were_merged_otherwise_are_computed(planner):
    [b] = find(planner, NEUTRAL, B)
    plan = plan_without_marks(planner, [*PREFIX, 7, *B[1:-1], 8, *QUESTION])
    assert plan.placements == [Placement(6, 34, b, False, offset=1)]


def test_a_chunk_behind_its_own_prefix_is_exact_without_marks_too(planner):
    [a] = find(planner, prefix_digest(PREFIX), A)
    [b] = find(planner, NEUTRAL, B)
    plan = plan_without_marks(planner, PROMPT)
    assert plan.placements == [Placement(5, 25, a, True), Placement(25, 55, b, False)]
    assert plan.exact_tokens == 25


def test_a_chunk_of_another_prefix_is_left_and_does_not_hide_the_others(planner):
    find(planner, prefix_digest([1, 2, 3]), A)
    [b] = find(planner, NEUTRAL, B)
    assert [placement.key for placement in plan_without_marks(planner, PROMPT).placements] == [b]


def test_entries_of_other_models_and_namespaces_are_not_found(planner):
    put(planner, A, fingerprint="other-model", findable=True), put(planner, B, namespace="other", findable=True)
    assert chunks_of(plan_without_marks(planner, PROMPT)) == []


def test_the_last_token_is_left_to_vllm_without_marks_too(planner):
    [a] = find(planner, NEUTRAL, A)
    assert plan_without_marks(planner, PREFIX + A).placements == [Placement(5, 24, a, False)]


def test_searching_can_be_switched_off():
    planner = make_planner(match=False)
    find(planner, NEUTRAL, A, B)
    assert chunks_of(plan_without_marks(planner, PROMPT)) == []
    assert len(plan_of(planner).placements) == 2


def test_a_chunk_that_one_rank_lacks_is_not_used(planner):
    planner.lookup.facts = ModelFacts("model", LAYERS, ranks=2)
    [a] = find(planner, NEUTRAL, A)
    assert chunks_of(plan_without_marks(planner, PROMPT)) == []
    kv = torch.zeros(LAYERS, len(A), 1, 2)
    planner.lookup.store.put(rank_keys(a, 2)[1], KVEntry(kv, kv), fingerprint="model", namespace="default")
    assert [placement.key for placement in plan_without_marks(planner, PROMPT).placements] == [a]


# Marks come from clients.


@pytest.mark.parametrize(("spans", "clean"), [
    ([], []),
    ([(5, 25), (25, 55)], [(5, 25), (25, 55)]),
    ([(25, 55), (5, 25)], [(5, 25), (25, 55)]),
    ([(5, 25), (5, 25)], [(5, 25)]),
    ([(5, 25), (24, 55)], [(5, 25)]),
    ([(25, 5), (7, 7)], []),
    ([(-5, 25), (25, 55)], [(25, 55)]),
    ([(25, 68), (5, 20)], [(5, 20)]),
    ([(5, 67)], [(5, 67)]),
    ([(5, 10**30)], []),
])
def test_spans_are_put_in_order_and_impossible_ones_left_out(planner, spans, clean):
    plan = plan_of(planner, spans=spans)
    assert [(chunk.start, chunk.start + chunk.tokens) for chunk in plan.stats.chunks] == clean


@pytest.mark.parametrize("spans", [5, "ab", [1, 2], [[1]], [[1, 2, 3]], [["a", "b"]], [[None, 25]],
                                   [[5, float("inf")]], [[5, float("nan")]]], ids=str)
def test_spans_that_make_no_sense_end_in_a_full_prefill_not_in_an_error(planner, spans):
    put(planner, A)
    assert planner.plan(make_request(PROMPT), spans) is None


@pytest.mark.parametrize("policy", ["first", [1], {"policy": "nope"}, {"policy": ["first"]}, {"ratio": "x"}, {"x": 1},
                                    {"policy": "first", "tokens": -1}, {1: 2}], ids=str)
def test_a_policy_that_makes_no_sense_ends_in_a_full_prefill_not_in_an_error(planner, policy):
    put(planner, A)
    assert planner.plan(make_request(PROMPT), [list(SPAN_A)], policy) is None


def test_a_prompt_without_chunks_has_a_plan_without_chunks(planner):
    assert chunks_of(planner.plan(make_request(PROMPT))) == []


numbers = st.integers(-3, 45)


@settings(deadline=None)
@given(spans=st.lists(st.tuples(numbers, numbers), max_size=8), stored=st.sets(st.integers(0, 39), max_size=12),
       length=st.integers(0, 40), shortest=st.integers(1, 4))
def test_placements_are_in_order_apart_not_empty_stored_and_before_the_last_token(spans, stored, length, shortest):
    planner = make_planner(min_chunk_tokens=shortest)
    ids = list(range(length))
    for start in stored & set(ids):
        for end in (start + 1, start + 4, start + 9):
            put(planner, ids[start:end])
    plan = plan_of(planner, ids, spans)
    if not plan.stats.chunks:
        return
    assert all(placement.key in planner.lookup.store for placement in plan.placements)
    edges = [edge for placement in plan.placements for edge in (placement.start, placement.end)]
    assert edges == sorted(edges)
    assert all(placement.start < placement.end <= length - 1 for placement in plan.placements)
    assert bool(plan.placements) == any(chunk.reused for chunk in plan.stats.chunks)
    assert all(chunk.reused != bool(chunk.reason) for chunk in plan.stats.chunks)
    assert 0 <= plan.exact_tokens <= length


# Requests that are prefilled in full whatever is stored.

IMAGE = MultiModalFeatureSpec(None, "image", "hash", PlaceholderRange(offset=1, length=2))
REFUSED = {
    "LoRA": {"lora_request": LoRARequest("adapter", 1, "/adapter")},
    "multimodal": {"mm_features": [IMAGE]},
    "prompt logprobs": {"sampling_params": SamplingParams(max_tokens=4, prompt_logprobs=1)},
    "embeddings": {"prompt_embeds": torch.zeros(len(PROMPT), 8), "prompt_is_token_ids": [True] * 60 + [False] * 7},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_requests_whose_kv_depends_on_more_than_tokens_are_not_blended(planner, options):
    put(planner, A), put(planner, B)
    plan = plan_of(planner, block_size=None, **options)
    assert (plan.placements, plan.salt) == ([], b"")
    [reason] = {chunk.reason for chunk in plan.stats.chunks}
    assert f'"{reason}"' in ChunkStats.__doc__


def test_a_prompt_of_embeddings_alone_has_no_chunks(planner):
    request = make_request(None, None, prompt_embeds=torch.zeros(12, 8))
    assert planner.plan(request, [[0, 5]]) is None


def test_a_store_that_cannot_be_asked_ends_in_a_full_prefill():
    planner = make_planner()
    put(planner, A)
    planner.lookup.store.close()
    assert plan_of(planner).placements == []


@pytest.mark.parametrize("reason", ["not stored", "too short", "damaged", "prefix cached", "not worth a pass",
                                    "pass failed"])
def test_the_other_reasons_are_documented(reason):
    assert f'"{reason}"' in ChunkStats.__doc__


# What would be of use another time.


def test_a_prefix_that_comes_again_is_missing_until_it_is_stored():
    planner = make_planner(min_chunk_tokens=5)
    put(planner, A)
    assert plan_of(planner).missing == [Missing(B, False, "default")]
    assert Missing(PREFIX, True, "default") in plan_of(planner).missing
    put(planner, PREFIX, prefix_digest())
    assert plan_of(planner).missing == [Missing(B, False, "default")]


# Whether a pass is worth it.


def test_a_pass_that_would_compute_more_than_vllm_has_to_is_not_worth_it(planner):
    long = list(range(5000, 5400))
    put(planner, A)
    plan = plan_of(planner, long + A + QUESTION, [(400, 420)])
    assert planner.worth(plan, 0, 0)
    assert not planner.worth(plan, 0, 400)
    put(planner, long, prefix_digest())
    assert planner.worth(plan_of(planner, long + A + QUESTION, [(400, 420)]), 0, 200)
    full = plan_of(planner, long + A + QUESTION, [(400, 420)], policy={"policy": "full"})
    assert planner.worth(full, 0, 400)


def test_chunks_that_were_not_worth_a_pass_say_so(planner):
    put(planner, A)
    plan = plan_of(planner)
    plan.declined, plan.stats.prefix_cached_tokens = True, 5
    assert [chunk.reason for chunk in planner.conclude(plan, None).chunks] == ["not worth a pass", "not stored"]


# What is exact.


def test_exact_tokens_end_where_the_first_approximate_entry_begins(planner):
    behind = prefix_digest(PREFIX)
    put(planner, A, behind), put(planner, B)
    assert plan_of(planner).exact_tokens == 25
    planner.lookup.store.clear()
    put(planner, PREFIX, prefix_digest()), put(planner, B)
    assert plan_of(planner).exact_tokens == 25  # the first chunk is computed, and so exact
    put(planner, A)
    assert plan_of(planner).exact_tokens == 5


def test_where_every_entry_is_exact_the_whole_prompt_is_and_nothing_is_salted(planner):
    put(planner, A, prefix_digest(PREFIX))
    plan = plan_of(planner)
    assert (plan.exact_tokens, plan.salt) == (len(PROMPT), b"")


# What the salt names.


def salt_of(planner, ids=PROMPT, spans=(SPAN_A, SPAN_B), **options):
    salt = plan_of(planner, ids, spans, **options).salt
    assert len(salt) == 16
    return salt


def test_equal_prompts_have_equal_salts(planner):
    put(planner, A), put(planner, B)
    assert salt_of(planner) == salt_of(planner)
    for policy in (NoRecompute(), First(3), CacheBlend(), Query(layers=(0.2, 0.9))):
        over_json = json.loads(json.dumps(policy.settings()))
        assert salt_of(planner, policy=policy.settings()) == salt_of(planner, policy=over_json)


def test_the_salt_depends_on_the_policy_and_its_settings(planner):
    put(planner, A), put(planner, B)
    policies = [NoRecompute(), First(), First(3), CacheBlend(), CacheBlend(ratio=0.3), CacheBlend(check_layers=2),
                Query(), Query(ratio=0.3), Query(over_rows="mean"), Query(reach=0)]
    assert len({salt_of(planner, policy=policy.settings()) for policy in policies}) == len(policies)


def test_the_salt_depends_on_sparse_attention(planner):
    put(planner, A), put(planner, B)
    salts = {salt_of(planner)}
    for budget in (0, 64):
        other = Planner(BlendConfig(policy="none", sparse_attention=budget), planner.lookup.store)
        other.lookup.facts = planner.lookup.facts
        salts.add(salt_of(other))
    assert len(salts) == 3


def test_the_salt_depends_on_the_entries_that_stand_in_and_on_their_places(planner):
    put(planner, A)
    salts = [salt_of(planner)]
    put(planner, B)
    salts.append(salt_of(planner))
    put(planner, B, prefix_digest(PREFIX))
    salts.append(salt_of(planner))
    put(planner, PREFIX, prefix_digest())
    salts.append(salt_of(planner))
    salts.append(salt_of(planner, [1, *PROMPT], [(6, 26), (26, 56)]))
    assert len(set(salts)) == 5


def test_a_chunk_cut_short_by_the_prompts_end_has_another_salt(planner):
    put(planner, A)
    assert salt_of(planner, PREFIX + A, [SPAN_A]) != salt_of(planner, PREFIX + A + QUESTION, [SPAN_A])


BETWEEN = list(range(700, 704))


@pytest.mark.parametrize(("policy", "counts"), [
    (NoRecompute(), ""), (Full(), ""), (First(), ""), (First(reach=64), "between"), (CacheBlend(), "between"),
    (CacheBlend(reach=64), "between"), (Query(), "between question"), (Query(reach=0), "between question")], ids=str)
def test_the_salt_depends_on_what_the_policy_says(planner, policy, counts):
    """Text between chunks reaches the KV of earlier ones by a choice among all chunks, or by drift; the question by
    what it looks at."""
    put(planner, A), put(planner, B)
    spans = [SPAN_A, (29, 59)]
    salt = salt_of(planner, PREFIX + A + BETWEEN + B + QUESTION, spans, policy=policy)
    between = salt_of(planner, PREFIX + A + [1, *BETWEEN[1:]] + B + QUESTION, spans, policy=policy)
    question = salt_of(planner, PREFIX + A + BETWEEN + B + [1, *QUESTION[1:]], spans, policy=policy)
    last = salt_of(planner, PREFIX + A + BETWEEN + B + [*QUESTION[:-1], 1], spans, policy=policy)
    assert (between != salt) == ("between" in counts)
    assert (question != salt) == ("question" in counts)
    assert last == salt, "a pass does not see the last token"


class Mine(Query):
    """A user's class with another's name and settings, which another engine version may have selected otherwise."""


def test_the_salt_depends_on_the_policys_class(planner):
    put(planner, A)
    assert salt_of(planner, policy=Mine()) != salt_of(planner, policy=Query())


def test_a_policy_that_says_nothing_depends_on_everything():
    class Silent(NoRecompute):
        name = "silent"
        depends_on = Policy.depends_on

    assert Silent().depends_on == "prompt"


def test_with_rows_chosen_by_the_question_the_salt_depends_on_where_it_begins(planner):
    put(planner, A)
    spans = [[SPAN_A], [SPAN_A, SPAN_B]]  # the second is not stored: the entries are the same, the question is not
    plans = [plan_of(planner, spans=s, policy=Query().settings()) for s in spans]
    assert plans[0].placements == plans[1].placements
    assert plans[0].question_start != plans[1].question_start
    assert plans[0].salt != plans[1].salt


# Where the question begins.


@pytest.mark.parametrize(("spans", "question", "start"), [
    ([SPAN_A, SPAN_B], 12, 55),
    ([SPAN_A, SPAN_B], 8, 55),
    ([SPAN_A, SPAN_B], 7, 30),  # next to nothing: the prompt's last 32 tokens
    ([SPAN_A, SPAN_B], 0, 23),
    ([SPAN_B, SPAN_A], 9, 55),
])
def test_the_question_is_what_follows_the_last_chunk(planner, spans, question, start):
    assert plan_of(planner, PREFIX + A + B + [1] * question, spans).question_start == start


def test_the_question_of_a_short_prompt_begins_within_it(planner):
    assert plan_of(planner, [1, 2, 3], [(1, 3)]).question_start == 0


# What became of it.

REPORT = BlendReport(row_layers=100, reused=40, recomputed=9, load_s=1.0, score_s=2.0, blend_s=3.0)


def test_a_report_becomes_statistics(planner):
    put(planner, A), put(planner, B)
    plan = plan_of(planner)
    stats = planner.conclude(plan, REPORT)
    assert (stats.chunks_found, stats.chunks_reused, stats.chunks_missed) == (2, 2, 0)
    assert (stats.reused_tokens, stats.recomputed_tokens, stats.failure) == (40, 9, "")
    assert (stats.load_s, stats.score_s, stats.blend_s) == (1.0, 2.0, 3.0)
    assert stats.rows == (100 + LAYERS) / (LAYERS * len(PROMPT))  # and vLLM's last token
    assert BlendStats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats


def test_all_rows_are_a_full_prefill(planner):
    put(planner, A)
    report = BlendReport(row_layers=LAYERS * (len(PROMPT) - 1))
    assert planner.conclude(plan_of(planner), report).rows == 1.0


def test_without_a_pass_the_chunks_came_from_the_prefix_cache(planner):
    put(planner, A)
    plan = plan_of(planner)
    plan.stats.prefix_cached_tokens = 60
    stats = planner.conclude(plan, None)
    assert [chunk.reason for chunk in stats.chunks] == ["prefix cached", "not stored"]
    assert (stats.chunks_reused, stats.rows) == (0, 1 - 60 / len(PROMPT))


def test_a_failed_pass_is_a_full_prefill_that_says_why(planner):
    put(planner, A)
    stats = planner.conclude(plan_of(planner), dataclasses.replace(REPORT, failure="RuntimeError: out of memory"))
    assert stats.failure == "RuntimeError: out of memory"
    assert [chunk.reason for chunk in stats.chunks] == ["pass failed", "not stored"]
    assert (stats.chunks_reused, stats.reused_tokens, stats.recomputed_tokens, stats.rows) == (0, 0, 0, 1.0)


def test_an_entry_that_was_lost_in_between_is_named_and_no_longer_exact(planner):
    prefix = put(planner, PREFIX, prefix_digest())
    a = put(planner, A, prefix_digest(PREFIX))
    put(planner, B)
    stats = planner.conclude(plan_of(planner), BlendReport(damaged=[a, prefix]))
    assert [(chunk.reused, chunk.exact, chunk.reason) for chunk in stats.chunks] == [
        (False, False, "damaged"), (True, False, "")]


def test_concluding_leaves_the_plan_as_it_is(planner):
    put(planner, A)
    plan = plan_of(planner)
    early = planner.conclude(plan, None)
    late = planner.conclude(plan, REPORT)
    assert early.chunks_reused == 0
    assert late.chunks_reused == 1
    assert plan.stats.chunks[0].reused


def test_a_request_without_stored_chunks_concludes_too(planner):
    stats = planner.conclude(plan_of(planner), None)
    assert (stats.rows, [chunk.reason for chunk in stats.chunks]) == (1.0, ["not stored", "not stored"])


def test_the_exact_policy_uses_nothing_that_is_approximate(planner):
    put(planner, A, prefix_digest(PREFIX))
    put(planner, PREFIX, prefix_digest(()))
    put(planner, B)
    plan = plan_of(planner, policy={"policy": "exact"})
    assert [(p.start, p.end, p.exact) for p in plan.placements] == [(0, 5, True), (5, 25, True)]
    assert [(c.reused, c.exact, c.reason) for c in plan.stats.chunks] == [
        (True, True, ""), (False, False, "approximate")]
    assert plan.keys[1] == ""
    assert plan.exact_tokens == len(PROMPT)
    neutral = plan_of(planner, spans=[SPAN_B], policy={"policy": "exact"}, ids=[7, *PROMPT[1:]])
    assert neutral.placements == []


# What clients may choose.


def test_a_policy_that_costs_more_than_a_prefill_is_refused_whoever_names_it(caplog):
    costly = {"policy": "cacheblend", "ratio": 1.0, "policy_settings": {"check_layers": [1, 2, 3]}}
    with pytest.raises(ConfigError, match="check_layers: its scoring passes may compute"):
        make_planner(**costly)
    planner = make_planner()
    put(planner, A)
    assert plan_of(planner, policy={"policy": "cacheblend", "ratio": 1.0, "check_layers": [1, 2, 3]}) is None
    assert "check_layers" in caplog.text


def test_where_clients_may_not_choose_a_policy_theirs_is_ignored_and_the_answer_says_so():
    planner = make_planner(client_policy=False)
    put(planner, A), put(planner, B)
    plan = plan_of(planner, policy={"policy": "full"})
    assert (plan.policy, plan.stats.policy) == (NoRecompute(), "none")
    assert plan.stats.to_dict()["ignored"] == "policy: client_policy is off"
    assert plan_of(planner).stats.ignored == ""


def test_more_spans_than_allowed_end_in_a_full_prefill_before_they_are_sorted():
    planner = make_planner(max_documents=2)
    put(planner, A)
    assert plan_of(planner, spans=[SPAN_A, SPAN_B]).placements
    assert plan_of(planner, spans=[SPAN_A, SPAN_B, (55, 60)]) is None


def test_chunks_of_a_salt_are_found_with_it_alone_and_those_of_the_namespace_by_all():
    planner = make_planner()
    theirs = scope_of(planner.config, "theirs")
    put(planner, A, namespace=theirs, findable=True), put(planner, B)
    for salt, first in ((None, (False, False, "not stored")), ("others", (False, False, "not stored")),
                        ("theirs", (True, False, ""))):
        plan = plan_of(planner, cache_salt=salt)
        assert chunks_of(plan) == [first, (True, False, "")]
        assert {missing.scope for missing in plan.missing} == ({scope_of(planner.config, salt)} if salt != "theirs"
                                                               else set())
    assert [chunk.start for chunk in plan_of(planner, spans=[], cache_salt="theirs").stats.chunks] == [5]
    assert chunks_of(plan_of(planner, spans=[], cache_salt="others")) == []


def test_a_request_of_no_tenant_is_not_blended():
    planner = make_planner(tenants="tenants.yaml")
    put(planner, A), put(planner, B)
    assert plan_of(planner, cache_salt="theirs") is None
