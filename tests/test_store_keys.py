"""A key stands for the model, the namespace, the prefix and the chunk, and for nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError
from blendrag.store import PrefixHasher, entry_key, prefix_digest
from blendrag.store.keys import NEUTRAL

KEY = "068cf8ad6665af7a1205c9d119bdd12703012a0e2bda5c9e215099d68fcd2d93"
EMPTY = "f1ac944321812b85bef7ec442e53134d8256a4d44c01fec5c7335406489e9a40"

# Small alphabets, so that what one field lost the next could have gained.
texts = st.text("ab\0\x01", max_size=3)
ids = st.lists(st.sampled_from([0, 1, 97, 256, 2**31, -1]), max_size=4)
inputs = st.tuples(texts, texts, ids, ids)


def key_of(fingerprint, namespace, prefix, chunk):
    return entry_key(fingerprint, namespace, prefix_digest(prefix), chunk)


@given(inputs, inputs)
def test_keys_are_equal_exactly_where_the_inputs_are(a, b):
    assert (key_of(*a) == key_of(*b)) == (a == b)


@given(st.text(), st.text(), ids, ids)
def test_any_text_has_a_key_of_64_hex_digits(fingerprint, namespace, prefix, chunk):
    key = key_of(fingerprint, namespace, prefix, chunk)
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


def test_keys_stay_the_same_between_versions():
    assert key_of("model", "default", [], [1, 2, 3]) == KEY
    assert prefix_digest().hex() == EMPTY


@given(ids)
def test_the_neutral_variant_is_behind_no_prefix_not_even_the_empty_one(prefix):
    assert entry_key("m", "n", NEUTRAL, [1]) != key_of("m", "n", prefix, [1])


def test_tokens_at_the_edge_between_prefix_and_chunk_count_on_their_side():
    assert len({key_of("m", "n", [1, 2], [3]), key_of("m", "n", [1], [2, 3]), key_of("m", "n", [], [1, 2, 3])}) == 3


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint32, torch.tensor])
def test_ids_may_come_in_any_container(kind):
    values = [5, 0, 151_643]
    same = np.array(values, dtype=kind) if isinstance(kind, type) and issubclass(kind, np.integer) else kind(values)
    assert key_of("m", "n", same, same) == key_of("m", "n", values, values)


@pytest.mark.parametrize("wrong", [[1.5], [[1, 2]], ["1"], [2**64], [2**63], [True], [None]])
def test_what_is_no_token_id_is_refused(wrong):
    with pytest.raises(StoreError, match="pass what the tokenizer returned"):
        prefix_digest(wrong)


def test_a_prefix_is_given_by_its_digest():
    with pytest.raises(StoreError, match=r"use prefix_digest\(ids\)"):
        entry_key("m", "n", b"", [1])


@given(ids, st.data())
def test_a_prefix_hasher_names_every_beginning_in_any_order(prompt, data):
    hasher = PrefixHasher(prompt)
    for end in data.draw(st.lists(st.integers(0, len(prompt)))):
        assert hasher.digest(end) == prefix_digest(prompt[:end])


@pytest.mark.parametrize("end", [-1, 4])
def test_a_prefix_hasher_knows_the_prompts_end(end):
    with pytest.raises(StoreError, match="not within the prompt's 3"):
        PrefixHasher([1, 2, 3]).digest(end)
