"""Fields of requests that reach the engine: what makes no sense is refused with the field's name."""

import pytest

from blendrag import BlendConfig
from blendrag.blend_params import BlendParams, check_client_params, read_blend_params
from blendrag.errors import RequestError
from blendrag.policies import Query
from blendrag.serve.fields import check_fields

CONFIG = BlendConfig(max_documents=3)


@pytest.mark.parametrize("value", [
    None, True, False, {}, {"spans": [[0, 2], [2, 5]]}, {"spans": [[4, 5], [0, 2]]}, {"documents": ["a"]},
    {"policy": {"policy": "full"}}, {"policy": {"ratio": 0.3}}, {"policy": None, "spans": None}, {"explain": True},
    {"policy": {"policy": "cacheblend", "check_layers": [1], "ratio": 0.2}},
], ids=str)
def test_what_makes_sense_is_taken(value):
    check_client_params(value, CONFIG)


@pytest.mark.parametrize(("value", "field", "remedy"), [
    ("full", "", "is an object or false, not a text: send"),
    (7, "", "not a number: send"),
    ([], "", "not a list: send"),
    ({"polcy": {}}, ".polcy", "did you mean 'policy'?"),
    ({"x" * 99: {}}, "." + "x" * 99, "it has spans, documents, policy, explain"),
    ({"policy": "full"}, ".policy", 'send {"policy": "full"}'),
    ({"policy": {"policy": "nope"}}, ".policy", "there is no policy 'nope': choose one of"),
    ({"policy": {"policy": "os:system"}}, ".policy", "choose one of"),
    ({"policy": {"ratio": 2}}, ".policy", "ratio"),
    ({"policy": {"ration": 0.2}}, ".policy", "it takes"),
    ({"spans": [[1, 2, 3]]}, ".spans", "a list of [start, end]"),
    ({"spans": [["1", 2]]}, ".spans", "a list of [start, end]"),
    ({"spans": [[-1, 2]]}, ".spans", "a list of [start, end]"),
    ({"spans": [[True, 2]]}, ".spans", "a list of [start, end]"),
    ({"spans": [[0, 10**30]]}, ".spans", "a list of [start, end]"),
    ({"spans": [[2, 2]]}, ".spans", "is empty"),
    ({"spans": [[0, 3], [2, 4]]}, ".spans", "overlaps another one"),
    ({"spans": [[0, 11]]}, ".spans", "outside of the prompt of 10 tokens"),
    ({"spans": [[0, 1], [1, 2]], "documents": ["a", "b"]}, "", "names 4 documents and spans"),
    ({"documents": "text"}, ".documents", "a list of texts"),
    ({"documents": [7]}, ".documents", "a list of texts"),
    ({"document_ids": [[1]]}, ".document_ids", "set by the server"),
    ({"explain": 1}, ".explain", "true or false"),
], ids=str)
def test_nonsense_is_refused_by_its_field(value, field, remedy):
    with pytest.raises(RequestError) as caught:
        check_client_params(value, CONFIG, prompt_tokens=10)
    assert caught.value.param == f"kv_transfer_params.blend{field}"
    assert remedy in str(caught.value)


def test_an_operator_may_keep_the_policy_to_himself():
    config = BlendConfig(client_policy=False)
    check_client_params({"documents": ["a"]}, config)
    with pytest.raises(RequestError, match="leave policy out"):
        check_client_params({"policy": {"ratio": 1.0}}, config)


def test_the_engine_reads_what_the_server_sets():
    assert read_blend_params({"document_ids": [[1, 2]]}) == BlendParams(document_ids=[[1, 2]])


@pytest.mark.parametrize(("body", "field", "remedy"), [
    ({"kv_transfer_params": "text"}, "kv_transfer_params", "is an object, not a text"),
    ({"kv_transfer_params": []}, "kv_transfer_params", "is an object, not a list"),
    ({"kv_transfer_params": {"other": ["\ud800"]}}, "kv_transfer_params", "half of a surrogate pair"),
    ({"kv_transfer_params": {"\udfff": 1}}, "kv_transfer_params", "half of a surrogate pair"),
    ({"kv_transfer_params": {"other": 2**64}}, "kv_transfer_params", "more than 64 bits"),
    ({"vllm_xargs": "text"}, "vllm_xargs", "is an object, not a text"),
    ({"vllm_xargs": {"kv_transfer_params": "text"}}, "vllm_xargs", "send it as a field of its own"),
    ({"vllm_xargs": {"a": "\ud800"}}, "vllm_xargs", "half of a surrogate pair"),
    ({"cache_salt": 7}, "cache_salt", "not a number"),
    ({"cache_salt": ""}, "cache_salt", "not empty"),
    ({"cache_salt": "\ud800"}, "cache_salt", "half of a surrogate pair"),
    ({"cache_salt": "blendrag-tenant:other:"}, "cache_salt", "choose another one"),
    ({"prompt": [1, 2, 3], "kv_transfer_params": {"blend": {"spans": [[0, 4]]}}}, "kv_transfer_params.blend.spans",
     "outside of the prompt of 3 tokens"),
    ({"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {"blend": {"document_ids": [[1]]}}}}},
     "kv_transfer_params.blend.document_ids", "set by the server"),
], ids=str)
def test_fields_that_vllm_would_fail_at_are_refused_by_name(body, field, remedy):
    with pytest.raises(RequestError) as caught:
        check_fields(body, CONFIG)
    assert caught.value.param == field
    assert remedy in str(caught.value)


def test_other_fields_are_vllms():
    check_fields({"kv_transfer_params": {"do_remote_decode": True}, "vllm_xargs": {"session": 1}, "cache_salt": "mine",
                  "sampling_params": {"extra_args": None}, "prompt": [[1, 2], [3]]}, CONFIG)


def test_an_engine_in_this_process_hands_over_the_policy_itself():
    params = read_blend_params({"policy": Query(ratio=0.3)})
    assert isinstance(params, BlendParams)
    assert params.policy == Query(ratio=0.3)
