"""A policy says which tokens of the reused chunks are computed again: all of them in one matrix, then each alone."""

import dataclasses
import json
import pickle
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag import policies
from blendrag.errors import ConfigError
from blendrag.policies import (
    POLICIES,
    Attention,
    CacheBlend,
    Deviation,
    First,
    Full,
    Layout,
    NoRecompute,
    Policy,
    Query,
    Selective,
    amend,
    make_policy,
)
from blendrag.policies.registry import load

every_policy = pytest.mark.parametrize("kind", POLICIES.values(), ids=POLICIES)
ratio_policies = pytest.mark.parametrize("kind", [CacheBlend, Query])


@st.composite
def layouts(draw) -> Layout:
    """Chunks that do not overlap, with and without gaps."""
    ends, chunks = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=5)):
        chunks.append((ends + gap, ends + gap + length))
        ends += gap + length
    reused = torch.zeros(ends + draw(st.integers(1, 9)), dtype=torch.bool)
    for start, end in chunks:
        reused[start:end] = True
    return Layout(reused, tuple(chunks))


def scores_for(layout: Layout, seed: int = 0) -> torch.Tensor:
    return torch.rand(len(layout.reused), generator=torch.Generator().manual_seed(seed))


def selected(policy, layout: Layout, scores=None) -> torch.Tensor:
    """What is computed again; scores are given to those that ask for evidence only."""
    asked = policy.evidence(num_layers=8)
    chosen = policy.select(layout, (scores_for(layout) if scores is None else scores) if asked else None)
    assert chosen.dtype == torch.bool
    assert chosen.shape == layout.reused.shape
    return chosen & layout.reused


# All policies.


@every_policy
@settings(deadline=None)
@given(layout=layouts())
def test_a_policy_chooses_among_the_tokens_of_any_layout_and_leaves_it_alone(kind, layout):
    before = layout.reused.clone()
    assert torch.equal(selected(kind(), layout), selected(kind(), layout))
    assert torch.equal(layout.reused, before)


@every_policy
def test_where_nothing_is_reused_nothing_is_chosen(kind):
    assert not selected(kind(), Layout(torch.zeros(5, dtype=torch.bool), ())).any()


@every_policy
@pytest.mark.parametrize("num_layers", [1, 2, 3, 30, 80])
def test_evidence_is_measured_in_layers_that_the_model_has(kind, num_layers):
    policies = [kind(), *([CacheBlend(check_layers=(1, 5, 99))] if kind is CacheBlend else [])]
    for evidence in (step for policy in policies for step in policy.evidence(num_layers)):
        if isinstance(evidence, Attention):
            assert evidence.layers == tuple(sorted(set(evidence.layers)))
            assert set(evidence.layers) <= set(range(num_layers))
            assert evidence.layers
        else:
            assert 0 <= evidence.layer < num_layers


@every_policy
def test_a_policy_is_its_settings(kind):
    policy = kind()
    assert make_policy(policy) is policy
    assert make_policy(policy.name) == policy
    assert make_policy(json.loads(json.dumps(policy.settings()))) == policy
    assert hash(make_policy(policy.name)) == hash(policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "other"


@every_policy
@pytest.mark.parametrize("setting", ["ration", "name", "policy_settings", "evidence"])
def test_an_unknown_setting_is_refused_by_name(kind, setting):
    with pytest.raises(ConfigError, match=f"policy '{kind.name}' has no setting {setting}: it takes"):
        make_policy({"policy": kind.name, setting: 1})


def test_a_policy_says_which_settings_it_takes():
    with pytest.raises(ConfigError, match=r"it takes layers, over_rows, ratio, reach$"):
        make_policy({"policy": "query", "x": 1})
    with pytest.raises(ConfigError, match=r"it takes none$"):
        make_policy({"policy": "full", "x": 1})


@pytest.mark.parametrize("spec", ["nope", "", {}, {"ratio": 0.5}, {"policy": None}, {"policy": ["query"]}, 3, None,
                                  ["query"]])
def test_what_is_no_policy_is_refused(spec):
    with pytest.raises(ConfigError, match="policy"):
        make_policy(spec)


# Full and none.


@settings(deadline=None)
@given(layout=layouts())
def test_full_computes_everything_and_none_nothing(layout):
    assert torch.equal(selected(Full(), layout), layout.reused)
    assert not selected(NoRecompute(), layout).any()


# First.


@settings(deadline=None)
@given(layouts(), st.integers(0, 50))
def test_first_computes_the_beginning_of_each_chunk(layout, tokens):
    chosen = selected(First(tokens), layout)
    for start, end in layout.chunks:
        wanted = min(tokens, end - start)
        assert chosen[start : start + wanted].all()
        assert not chosen[start + wanted : end].any()


def test_first_takes_no_negative_count():
    with pytest.raises(ConfigError, match="policy 'first': tokens"):
        make_policy({"policy": "first", "tokens": -1})


# Those that rank tokens by evidence.


@ratio_policies
@settings(deadline=None)
@given(layout=layouts(), ratio=st.floats(0, 1))
def test_the_share_with_the_highest_scores_is_computed_and_at_least_one(kind, layout, ratio):
    scores = scores_for(layout)
    chosen = selected(kind(ratio=ratio), layout, scores)
    total = int(layout.reused.sum())
    assert int(chosen.sum()) == (min(total, max(1, round(ratio * total))) if ratio else 0)
    left = layout.reused & ~chosen
    if chosen.any() and left.any():
        assert scores[chosen].min() >= scores[left].max()


@ratio_policies
def test_scores_of_other_tokens_do_not_count(kind):
    layout = Layout(torch.tensor([False, True, True, False]), ((1, 3),))
    for other in (100.0, float("inf"), float("nan")):
        assert selected(kind(ratio=0.5), layout, torch.tensor([other, 1.0, 2.0, other])).tolist() == [0, 0, 1, 0]


@ratio_policies
def test_equal_scores_still_give_the_share(kind):
    layout = Layout(torch.ones(10, dtype=torch.bool), ((0, 10),))
    assert int(selected(kind(ratio=0.3), layout, torch.zeros(10)).sum()) == 3


@ratio_policies
@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "half"])
def test_a_ratio_is_a_share(kind, ratio):
    with pytest.raises(ConfigError, match=f"policy '{kind.name}': ratio"):
        make_policy({"policy": kind.name, "ratio": ratio})


def test_cacheblend_compares_keys_or_values_at_each_check_layer():
    assert CacheBlend().evidence(30) == (Deviation(layer=1, of="k"),)
    assert CacheBlend(check_layers=5, deviation="v").evidence(30) == (Deviation(layer=5, of="v"),)
    assert CacheBlend(check_layers=(2, 7)).evidence(30) == (Deviation(2, "k"), Deviation(7, "k"))


def test_check_layers_that_a_model_lacks_are_its_last_ones():
    assert CacheBlend(check_layers=99).evidence(30) == (Deviation(layer=29, of="k"),)
    assert CacheBlend(check_layers=(1, 50, 99)).evidence(30) == (Deviation(1, "k"), Deviation(28, "k"),
                                                                 Deviation(29, "k"))


def test_cacheblend_takes_one_ratio_or_one_for_each_check_layer():
    layout = Layout(torch.ones(100, dtype=torch.bool), ((0, 100),))
    for policy, counts in ((CacheBlend(0.2, (1, 2)), [20, 20]), (CacheBlend((0.5, 0.1), (1, 2)), [50, 10]),
                           (CacheBlend((0.3,), 1), [30])):
        assert [int(policy.select(layout, scores_for(layout), step).sum()) for step in range(len(counts))] == counts
        assert make_policy(json.loads(json.dumps(policy.settings()))) == policy


@pytest.mark.parametrize(("wrong", "said"), [
    ({"deviation": "q"}, "deviation: "),
    ({"check_layers": -1}, "check_layers: .*greater than or equal to 0"),
    ({"check_layers": [1, -1]}, r"check_layers\.1: .*greater than or equal to 0"),
    ({"check_layers": []}, "check_layers: .*name each layer once"),
    ({"check_layers": [2, 1]}, "check_layers: .*name each layer once"),
    ({"check_layers": [1, 1]}, "check_layers: .*name each layer once"),
    ({"ratio": [0.2, 0.1]}, "ratio: 2 ratios for 1 check layers: give one"),
    ({"ratio": [], "check_layers": [1]}, "ratio: 0 ratios for 1 check layers"),
    ({"ratio": [0.1, 0.2], "check_layers": [1, 2]}, "ratio: .* grows"),
    ({"ratio": [0.1, 2], "check_layers": [1, 2]}, r"ratio\.1: .*less than or equal to 1"),
    ({"check_layer": 1}, "no setting check_layer: it takes check_layers"),
])
def test_cacheblend_refuses_layers_and_ratios_that_do_not_fit(wrong, said):
    with pytest.raises(ConfigError, match=f"policy 'cacheblend'.*{said}"):
        make_policy({"policy": "cacheblend"} | wrong)


def test_query_measures_attention_in_a_range_of_the_depth():
    assert Query().evidence(30) == (Attention(layers=(19, 20, 21, 22, 23), over_rows="norm"),)
    assert Query(layers=(0.5, 1.0)).evidence(30) == (Attention(layers=tuple(range(15, 30)), over_rows="norm"),)
    assert Query(layers=(0.0, 1.0), over_rows="mean").evidence(4) == (Attention((0, 1, 2, 3), "mean"),)
    assert Query(layers=(0.66, 0.8)).evidence(10) == (Attention((6, 7), "norm"),)
    assert Query(layers=(1.0, 1.0)).evidence(10) == (Attention((9,), "norm"),)


@pytest.mark.parametrize("wrong", [{"layers": [0.8, 0.2]}, {"layers": [0.5]}, {"layers": [0, 2]}, {"layers": 0.5},
                                   {"over_rows": "max"}])
def test_query_takes_a_range_from_a_smaller_to_a_larger_share(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_policy({"policy": "query"} | wrong)


# Policies of a user's own.


@dataclasses.dataclass(frozen=True)
class Nothing(NoRecompute):
    name: ClassVar[str] = "nothing"

    share: float = 0.5
    names: tuple[str, ...] = ()


class Nameless(Policy):
    def select(self, layout, scores, step=0):
        return layout.reused.clone()


class Clash(NoRecompute):
    """Has the name that it inherits."""


class Unsure(Nothing):
    depends_on = "weather"


class Failing(Nothing):
    def stronger(self):
        return 1 // 0


class Stranger(Nothing):
    def stronger(self):
        return Full()


@dataclasses.dataclass(frozen=True)
class Drifting(Selective):
    name: ClassVar[str] = "drifting"
    depends_on: ClassVar[str] = "entries"

    def select(self, layout, scores, step=0):
        return layout.reused.clone()


def test_a_policy_object_of_any_class_is_used_as_it_is():
    policy = Nothing(0.25, ("a", "b"))
    assert make_policy(policy) is policy
    assert amend(policy, share=1) == Nothing(1.0, ("a", "b"))
    assert policy.label == "nothing(share=0.25, names=('a', 'b'))"
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(ConfigError, match="policy 'nothing': share: input should be a valid number"):
        amend(policy, share="much")


def test_a_policy_depends_on_the_whole_prompt_and_gets_no_stronger_unless_it_says_so():
    assert Policy.depends_on.fget(Nothing()) == "prompt"
    assert Nothing().stronger() is None


@pytest.mark.parametrize(("policy", "said"), [
    (Nothing(names=["a"]), r"policy 'nothing': names is a list: a setting is a number, a text"),
    (Nothing(share=torch.ones(1)), "policy 'nothing': share is a Tensor"),
    (Nameless(), "the policy class Nameless has no name: set"),
    (Clash(), "the policy class Clash has the name of another policy, 'none': give it a name of its own"),
    (Unsure(), "policy 'nothing': depends_on is 'weather': choose one of entries, chunks, prompt"),
    (Failing(), "policy 'nothing': depends_on or stronger fails .ZeroDivisionError"),
    (Stranger(), "policy 'nothing': stronger returns a Full: return a Stranger, or None"),
    (Drifting(reach=1.0), 'policy \'drifting\': its reach carries later text into earlier KV: let depends_on be'),
], ids=lambda value: type(value).__name__ if isinstance(value, Policy) else "")
def test_a_policy_class_that_cannot_work_is_refused_by_name(policy, said):
    with pytest.raises(ConfigError, match=said):
        make_policy(policy)


@pytest.fixture
def forgotten():
    """The class that a test registers is forgotten."""
    yield
    POLICIES.pop("nothing", None)


def test_a_class_that_settings_list_has_a_name(forgotten):
    with pytest.raises(ConfigError, match="there is no policy 'nothing'"):
        make_policy("nothing")
    assert load([f"{__name__}:Nothing", f"{__name__}:Nothing"]) == [Nothing, Nothing]
    assert make_policy({"policy": "nothing", "share": 1}) == Nothing(1.0)
    with pytest.raises(ConfigError, match="policy 'nothing' has no setting x: it takes names, share"):
        make_policy({"policy": "nothing", "x": 1})
    with pytest.raises(ConfigError, match="the policy class Unsure has the name of another policy"):
        load([f"{__name__}:Unsure"])


@pytest.mark.parametrize(("path", "said"), [
    ("nowhere:Policy", "the policy 'nowhere:Policy' cannot be imported .ModuleNotFoundError"),
    (f"{__name__}:Absent", "cannot be imported .AttributeError"),
    ("Policy", "write package.module:Class"),
    ("", "write package.module:Class"),
    (f"{__name__}:pytest", "is no policy: name a subclass"),
    ("blendrag.policies:Policy", "is no policy: name a subclass"),
    (f"{__name__}:Nameless", "has no name"),
    (f"{__name__}:Clash", "has the name of another policy, 'none'"),
])
def test_a_path_that_leads_to_no_policy_is_refused_by_name(forgotten, path, said):
    with pytest.raises(ConfigError, match=said):
        load([path])


def test_what_checks_settings_is_made_once_for_each_class():
    assert policies._adapter(Query) is policies._adapter(Query)
