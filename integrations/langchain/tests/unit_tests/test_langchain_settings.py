"""Construction, identity and arguments, all without a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blendrag import BlendConfig, BlendEngine
from blendrag.adapters import split_arguments
from blendrag.errors import ConfigError
from langchain_core.load import dumpd, load
from langchain_core.runnables import ConfigurableField, RunnableBinding

from langchain_blendrag import BlendLLM, BlendRetriever, ChatBlend

MODELS = [BlendLLM, ChatBlend]


@pytest.mark.parametrize("kind", MODELS)
def test_construction_starts_nothing_and_equal_settings_share_an_engine(kind: type[BlendLLM | ChatBlend]) -> None:
    first = kind(model="no/such-model", temperature=0.5, config={"ratio": 0.3}, engine_args={"max_model_len": 99})
    second = ChatBlend(model="no/such-model", config=BlendConfig(ratio=0.3), engine_args={"max_model_len": 99})
    other = kind(model="no/such-model", config={"ratio": 0.3})
    assert first.engine is second.engine
    assert first.engine is not other.engine


def test_an_engine_brings_its_settings() -> None:
    engine = BlendEngine("some/model", config=BlendConfig(policy="full"), max_model_len=77)
    model = BlendLLM(engine=engine)
    assert model.engine is engine
    assert (model.model, model.config, model.engine_args) == ("some/model", engine.config, {"max_model_len": 77})
    with pytest.raises(ConfigError, match="model differs"):
        BlendLLM(engine=engine, model="another/model")


def test_rebuilt_models_find_their_engine_again() -> None:
    """`configurable_fields` builds a new object for every call."""
    model = BlendLLM(model="some/model", engine_args={"max_model_len": 78})
    configurable = model.configurable_fields(temperature=ConfigurableField(id="temperature"))
    rebuilt, _ = configurable.prepare({"configurable": {"temperature": 0.7}})  # type: ignore[attr-defined]
    assert rebuilt.temperature == 0.7
    assert rebuilt.engine is model.engine
    shared = BlendLLM(engine=model.engine).configurable_fields(temperature=ConfigurableField(id="temperature"))
    rebuilt, _ = shared.prepare({"configurable": {"temperature": 0.7}})  # type: ignore[attr-defined]
    assert rebuilt.engine is model.engine


def test_a_copy_with_other_settings_has_an_identity_of_its_own() -> None:
    """Response caches compare it."""
    model = ChatBlend(model="some/model", temperature=0)
    identity = model._get_llm_string()
    copy = model.model_copy(update={"temperature": 0.5})
    assert copy._get_llm_string() != identity
    copy.temperature = 0
    assert copy._get_llm_string() == identity.replace("0.0", "0")


def test_a_closed_engine_is_replaced() -> None:
    model, twin = BlendLLM(model="some/model", top_k=3), ChatBlend(model="some/model")
    before = model.engine
    with model:
        assert twin.engine is before
    assert model.engine is not before
    assert twin.engine is model.engine


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "needs a model"),
    ({"model": "m", "max_model_len": 5}, "no argument 'max_model_len'.*engine_args"),
    ({"model": "m", "config": {"ratio": 2}}, "ratio"),
    ({"model": "m", "config": {"policy": "best"}}, "there is no policy 'best'"),
])
def test_bad_arguments_are_named(kind: type[BlendLLM | ChatBlend], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**arguments)


def test_arguments_of_hosted_models_are_accepted() -> None:
    model = ChatBlend(model=Path("a/b"), api_key="test", timeout=3, max_retries=1, stop="END")
    assert (model.model, model.stop) == ("a/b", ["END"])


@pytest.mark.parametrize("kind", MODELS)
def test_identity_holds_everything_that_changes_an_answer(kind: type[BlendLLM | ChatBlend]) -> None:
    plain = kind(model="m")
    for change in ({"temperature": 0.1}, {"max_tokens": 3}, {"stop": ["x"]}, {"seed": 1}, {"top_p": 0.5},
                   {"sampling_args": {"min_tokens": 2}}, {"config": {"policy": "full"}},
                   {"engine_args": {"dtype": "float32"}}, {"chat_template": "{{ messages }}"}, {"logprobs": True},
                   {"top_logprobs": 2}, {"model": "n"}):
        other = kind(**{"model": "m", **change})
        assert other._identifying_params != plain._identifying_params, change
        assert _cache_key(other) != _cache_key(plain), change
    assert kind(model="m")._identifying_params == plain._identifying_params
    assert _cache_key(kind(model="m")) == _cache_key(plain)


def _cache_key(model: BlendLLM | ChatBlend) -> str:
    """What LangChain's caches tell models apart by."""
    return model._get_llm_string() if isinstance(model, ChatBlend) else str(model.asdict())


def test_a_chats_identity_holds_its_template_and_its_tools() -> None:
    plain = ChatBlend(model="m")
    for change in ({"chat_template_kwargs": {"enable_thinking": False}}, {"tool_parser": "hermes"}):
        assert _cache_key(ChatBlend(model="m", **change)) != _cache_key(plain), change
    tools = {"tools": [{"type": "function", "function": {"name": "now", "parameters": {}}}]}
    assert plain._get_llm_string(**tools) != plain._get_llm_string()
    assert plain._get_llm_string(**tools, tool_choice="any") != plain._get_llm_string(**tools)


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
@pytest.mark.parametrize("policy", [{"policy": "first"}, {"policy": "query"}, {}])
@pytest.mark.parametrize("kind", MODELS)
def test_serialisation_round_trip(kind: type[BlendLLM | ChatBlend], policy: dict[str, str]) -> None:
    model = kind(model="m", temperature=0, stop=["x"], config={"store_path": "/tmp/kv"} | policy,
                 engine_args={"max_model_len": 9}, sampling_args={"min_tokens": 2}, logprobs=True, top_logprobs=2,
                 chat_template="{{ messages }}")
    back = load(dumpd(model), valid_namespaces=["langchain_blendrag"], allowed_objects=[kind])
    assert back._identifying_params == model._identifying_params
    assert back.config.uses_profile == model.config.uses_profile == (not policy)
    assert back.engine is model.engine


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_a_model_with_tools_is_serialised_too() -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}]
    bound: Any = ChatBlend(model="m", tool_parser="hermes").bind_tools(tools, tool_choice="any")
    back = load(dumpd(bound), valid_namespaces=["langchain_blendrag"], allowed_objects=[ChatBlend, RunnableBinding])
    assert back.kwargs == bound.kwargs
    assert back.bound._identifying_params == bound.bound._identifying_params


def test_a_calls_arguments_are_sorted() -> None:
    call = split_arguments({"temperature": 0.5, "max_tokens": 512, "stop": ["a", "b"], "top_p": None},
                           {"max_tokens": None, "policy": "first", "blend": True, "ratio": 0.2}, ["b", "c"])
    assert call.options == {"policy": "first", "blend": True, "ratio": 0.2}
    assert call.params.stop == ["a", "b", "c"]
    assert (call.params.temperature, call.params.max_tokens, call.params.top_p) == (0.5, None, 1.0)
    with pytest.raises(ConfigError, match="no argument 'best_of'"):
        split_arguments({}, {"best_of": 3})


def test_a_retriever_needs_one_engine() -> None:
    from langchain_core.runnables import RunnableLambda

    with pytest.raises(ConfigError, match="pass it as llm="):
        BlendRetriever(retriever=RunnableLambda(lambda _: []))
