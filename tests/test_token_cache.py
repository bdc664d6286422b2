"""A text is tokenised once in a process, whoever asks, and its ids are those that the tokenizer gives it."""

import copy
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from vllm.config import ModelConfig

from blendrag.errors import PromptError
from blendrag.models import fetch
from blendrag.runtime.compat import load_tokenizer
from blendrag.token_cache import TokenCache, token_cache_of
from blendrag.tokens import SegmentTokenizer
from tests.test_tokens import byte_level, every_tokenizer, texts


def never(text):
    raise AssertionError(f"{text!r} was tokenised again")


def ids_of(text):
    return [ord(letter) for letter in text]


# The ids.


@every_tokenizer
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_ids_are_those_of_a_tokenizer_that_remembers_nothing(tokens, text):
    whole = tokens._encode(text)
    continued = tokens._continue(text) if tokens._adds_space else whole
    chunk = tokens._encode_chunk(text)
    for _ in range(2):
        assert tokens.text_ids(text, first=True) == whole
        assert tokens.text_ids(text) == tokens.text_array(text).tolist() == continued
        assert tokens.chunk_ids(text) == chunk


@every_tokenizer
def test_lists_are_the_callers_and_arrays_are_nobodys(tokens):
    before = tokens.text_ids("the quick fox")
    tokens.text_ids("the quick fox").append(7)
    tokens.chunk_ids("the quick fox").clear()
    assert tokens.text_ids("the quick fox") == before
    with pytest.raises(ValueError, match="read-only"):
        tokens.text_array("the quick fox")[0] = 7


@every_tokenizer
def test_a_text_is_tokenised_once(tokens, monkeypatch):
    for ask in (tokens.text_ids, tokens.chunk_ids, tokens.text_array):
        before = list(ask("where is Paris?"))
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "_encode", never)
            assert list(ask("where is Paris?")) == before


def test_what_cannot_be_tokenised_is_refused_each_time():
    tokens = SegmentTokenizer(byte_level())
    for _ in range(2):
        with pytest.raises(PromptError, match="surrogate"):
            tokens.text_ids("half a pair: \ud83d")


# Whose it is.


def test_equal_tokenizers_share_one_cache_and_others_do_not():
    one, same, other = byte_level(), byte_level(), byte_level(template=None)
    assert token_cache_of(one) is token_cache_of(same)
    assert token_cache_of(one) is token_cache_of(copy.deepcopy(one))
    assert token_cache_of(one) is not token_cache_of(other)
    shared = token_cache_of(one)
    one.add_tokens([AddedToken("quick", special=False)])
    assert token_cache_of(one) is not shared


def test_the_tokenizer_that_vllm_hands_out_shares_its_cache():
    tokenizer = load_tokenizer(ModelConfig(str(fetch("smollm2"))))
    first, second = SegmentTokenizer(tokenizer), SegmentTokenizer(tokenizer)
    assert first._cache is second._cache


def test_a_tokenizer_with_code_of_its_own_has_a_cache_of_its_own():
    class Own(type(byte_level())):
        """Its ids may follow from anything."""

    tokenizer = byte_level()
    tokenizer.__class__ = Own
    assert token_cache_of(tokenizer) is not token_cache_of(tokenizer)


def test_a_cache_goes_with_the_last_of_its_tokenizers():
    tokens = SegmentTokenizer(byte_level(template="</s> $A"))
    number = id(tokens._cache)
    tokens._cache.ids("text", "a mark of this very cache", ids_of)
    del tokens
    gc.collect()
    renewed = token_cache_of(byte_level(template="</s> $A"))
    assert (id(renewed) != number) or len(renewed) == 0


def test_a_fork_has_caches_of_its_own():
    cache = token_cache_of(byte_level())
    child = os.fork()
    if not child:
        os._exit(0 if token_cache_of(byte_level()) is not cache else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Its bounds.


def test_the_least_recently_used_texts_leave_first():
    cache = TokenCache(budget=32_000)
    words = [f"{number:>100}" for number in range(40)]
    for word in words:
        cache.ids("text", word, ids_of)
        cache.ids("text", words[0], ids_of)
    assert cache.bytes <= cache.budget
    assert 10 < len(cache) < 40
    cache.ids("text", words[0], never)
    cache.ids("text", words[-1], never)
    with pytest.raises(AssertionError, match="tokenised again"):
        cache.ids("text", words[1], never)


def test_a_huge_text_is_not_kept_and_pushes_nothing_out():
    cache = TokenCache(budget=32_000)
    cache.ids("text", "small", ids_of)
    assert cache.ids("text", "huge " * 1000, ids_of).size == 5000
    assert len(cache) == 1
    cache.ids("text", "small", never)


@given(st.lists(st.tuples(st.sampled_from(["chunk", "text"]), st.text(max_size=300)), max_size=60))
def test_texts_and_ids_are_both_counted(asked):
    cache = TokenCache(budget=20_000)
    for kind, text in asked:
        assert cache.ids(kind, text, ids_of).tolist() == ids_of(text)
        kept = [(text, ids) for (_, text), (ids, _) in cache._entries.items()]
        assert sum(sys.getsizeof(text) + ids.nbytes for text, ids in kept) <= cache.bytes <= cache.budget


def test_threads_share_it():
    cache = TokenCache(budget=50_000)
    words = [f"{number:>50}" for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda word: cache.ids("text", word, ids_of), words * 20))
    assert all(np.array_equal(ids, ids_of(word)) for ids, word in zip(found, words * 20, strict=True))
    assert cache.bytes == sum(size for _, size in cache._entries.values()) <= cache.budget
