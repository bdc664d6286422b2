"""Blocks that hold approximate KV have hashes of their own; blocks before them are shared with every other request."""

import gc
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from blendrag.runtime.compat import prefix_cached
from blendrag.runtime.planning.salt import salt_block_hashes, salts_behind
from tests.helpers import make_request

BLOCK = 4
SALT = b"policy, entries"
OTHER = b"policy, other entries"


def plain(ids, **options) -> list:
    return list(make_request(list(ids), BLOCK, **options).block_hashes)


def salted(ids, exact_tokens, salt=SALT, **options):
    request = make_request(list(ids), BLOCK, **options)
    salt_block_hashes(request, ((exact_tokens, salt),), BLOCK)
    return request


@pytest.mark.parametrize("exact_tokens", [0, 1, 3, 4, 5, 7, 8, 12, 18, 19])
def test_exact_blocks_keep_their_hashes_and_later_ones_do_not(exact_tokens):
    ids = range(19)  # four blocks and a rest
    hashes = salted(ids, exact_tokens).block_hashes
    exact = exact_tokens // BLOCK
    assert len(hashes) == len(plain(ids)) == 4
    assert hashes[:exact] == plain(ids)[:exact]
    assert set(hashes[exact:]).isdisjoint(plain(ids))


@pytest.mark.parametrize("exact_tokens", [0, 3, 4, 9])
def test_later_hashes_depend_on_the_salt_and_on_nothing_else(exact_tokens):
    ids, exact = range(16), exact_tokens // BLOCK
    hashes = salted(ids, exact_tokens).block_hashes
    assert salted(ids, exact_tokens).block_hashes == hashes
    assert set(salted(ids, exact_tokens, OTHER).block_hashes[exact:]).isdisjoint(hashes)


@pytest.mark.parametrize("exact_tokens", [0, 4, 8])
def test_later_hashes_still_depend_on_all_tokens_before_them(exact_tokens):
    ids = list(range(16))
    hashes = salted(ids, exact_tokens).block_hashes
    for changed in range(16):
        other = salted([*ids[:changed], 99, *ids[changed + 1 :]], exact_tokens).block_hashes
        assert other[: changed // BLOCK] == hashes[: changed // BLOCK]
        assert set(other[changed // BLOCK :]).isdisjoint(hashes)


@pytest.mark.parametrize("hash_name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_every_hash_function_of_vllm_can_be_salted(hash_name):
    request = make_request(list(range(12)), BLOCK, hash_name)
    before = list(request.block_hashes)
    salt_block_hashes(request, ((4, SALT),), BLOCK)
    request.append_output_token_ids([1, 2, 3, 4])
    assert request.block_hashes[0] == before[0]
    assert len(set(request.block_hashes)) == 4
    assert {(type(h), len(h)) for h in request.block_hashes} == {(type(h), len(h)) for h in before}


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.integers(1, 9), max_size=5), st.integers(1, 7))
def test_decoded_tokens_continue_the_chain_as_if_they_had_been_prompt(length, exact_tokens, steps, block_size):
    exact_tokens = min(exact_tokens, length)
    request = make_request(list(range(length)), block_size)
    salt_block_hashes(request, ((exact_tokens, SALT),), block_size)
    at = length
    for step in steps:
        request.append_output_token_ids(list(range(at, at + step)) if step > 1 else at)
        at += step
    whole = make_request(list(range(at)), block_size)
    unsalted = list(whole.block_hashes)
    salt_block_hashes(whole, ((exact_tokens, SALT),), block_size)
    exact = exact_tokens // block_size
    assert request.block_hashes == whole.block_hashes
    assert len(request.block_hashes) == at // block_size
    assert request.block_hashes[:exact] == unsalted[:exact]
    assert set(request.block_hashes[exact:]).isdisjoint(unsalted)


def test_where_all_tokens_are_exact_only_what_follows_is_salted():
    for length in (8, 10):
        request = salted(range(length), length)
        assert request.block_hashes == plain(range(length))
        request.append_output_token_ids(list(range(length, 13)))
        assert request.block_hashes[:2] == plain(range(13))[:2]
        assert request.block_hashes[2] != plain(range(13))[2]


def test_a_prompt_shorter_than_a_block_is_salted_once_it_fills_one():
    for exact_tokens in (0, 2, 3):
        request = salted(range(3), exact_tokens)
        assert request.block_hashes == []
        request.append_output_token_ids([3, 4])
        assert len(request.block_hashes) == 1
        assert request.block_hashes != plain(range(5))


def test_a_users_own_cache_salt_still_separates_requests():
    for exact_tokens in (0, 4):
        mine, yours, nobodys = (salted(range(12), exact_tokens, cache_salt=salt) for salt in ("mine", "yours", None))
        assert set(mine.block_hashes).isdisjoint(yours.block_hashes)
        assert set(mine.block_hashes).isdisjoint(nobodys.block_hashes)
    assert salted(range(12), 4, cache_salt="mine").block_hashes[0] == plain(range(12), cache_salt="mine")[0]


def test_no_choice_of_cache_salt_leads_to_blended_blocks():
    blended = salted(range(8), 0)
    assert set(blended.block_hashes).isdisjoint(plain(range(8), cache_salt=SALT.hex()))
    assert set(salted(range(8), 0, b"a").block_hashes).isdisjoint(salted(range(8), 0, b"ab").block_hashes)


@pytest.mark.parametrize(("exact_tokens", "left"), [(0, 0), (0, 3), (8, 2), (8, 3), (16, 4)])
def test_hashes_that_vllm_takes_back_are_computed_again_the_same(exact_tokens, left):
    request = salted(range(18), exact_tokens)  # a session whose input goes on keeps what is computed, at least
    before = list(request.block_hashes)
    del request.block_hashes[left:]
    request.update_block_hashes()
    assert request.block_hashes == before


def test_without_prefix_caching_there_is_nothing_to_salt():
    request = make_request(list(range(12)), None)
    salt_block_hashes(request, ((4, SALT),), BLOCK)
    request.append_output_token_ids([1, 2, 3, 4])
    assert request.block_hashes == []


def test_requests_are_freed_without_the_garbage_collector():
    gc.disable()
    try:
        request = salted(range(12), 4)
        gone = weakref.ref(request)
        del request
        assert gone() is None
    finally:
        gc.enable()


@settings(deadline=None)
@given(st.integers(0, 40), st.lists(st.integers(1, 9), max_size=5), st.lists(st.integers(0, 40), max_size=3))
def test_each_salt_is_that_of_the_blocks_up_to_the_next(length, steps, starts):
    salts = tuple((start, bytes([number])) for number, start in enumerate(sorted(starts)))
    request = make_request(list(range(length)), BLOCK)
    plain_hashes = salt_block_hashes(request, salts, BLOCK)
    for step in steps:
        request.append_output_token_ids(list(range(request.num_tokens, request.num_tokens + step)))
    assert plain_hashes == plain(range(request.num_tokens))
    for number, known in enumerate(request.block_hashes):
        of_block = [salt for start, salt in salts if start // BLOCK <= number]
        alone = salted(range(request.num_tokens), 0, of_block[-1]).block_hashes if of_block else plain_hashes
        assert known == alone[number]


def test_what_stands_behind_cached_blocks_depends_on_them():
    before = ((4, b"first"),)
    names = [salts_behind(*what)[-1][1] for what in (
        (before, 8, SALT), (before, 12, SALT), (before, 8, OTHER), (((4, b"second"),), 8, SALT), ((), 8, SALT))]
    assert len(set(names)) == len(names)
    assert salts_behind(before, 8, SALT)[:-1] == before


# What is cached under plain hashes.


def config_of(groups) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[None] * groups)


@pytest.mark.parametrize(("cached", "length", "found"), [(0, 12, 0), (2, 12, 8), (3, 13, 12), (3, 12, 8), (1, 4, 0)])
def test_versions_that_hand_out_the_block_pool_alone_are_asked_block_by_block(cached, length, found):
    """The prompt's last token is always computed, so a hit ends before it."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=BLOCK)
    request = make_request(list(range(length)), BLOCK)
    pool.cache_full_blocks(request=request, blocks=pool.get_new_blocks(3), num_cached_blocks=0,
                           num_full_blocks=cached, block_size=BLOCK, kv_cache_group_id=0)
    assert prefix_cached(request.block_hashes, length, None, pool, config_of(1), BLOCK) == found
    assert prefix_cached(request.block_hashes, length, None, pool, config_of(2), BLOCK) == 0
    assert prefix_cached(request.block_hashes, length, None, None, config_of(1), BLOCK) == 0


def test_without_prefix_caching_nothing_is_cached():
    pool = BlockPool(8, enable_caching=False, hash_block_size=BLOCK)
    assert prefix_cached(make_request(list(range(12)), None).block_hashes, 12, None, pool, config_of(1), BLOCK) == 0
