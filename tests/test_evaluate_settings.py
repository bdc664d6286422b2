"""From a command line to the policies that are compared."""

from __future__ import annotations

import pytest

from blendrag import BlendConfig
from blendrag.errors import ConfigError
from blendrag.evaluate import settings_of
from blendrag.policies import CacheBlend, First, Query

CONFIG = BlendConfig(policy="query", ratio=0.2)


def test_default_is_what_the_engine_uses_unasked() -> None:
    [default] = settings_of("default", [0.5], CONFIG)
    assert (default.name, default.policy, default.ratio, default.label) == ("default", Query(0.2), 0.2, "default 0.2")


def test_each_ratio_of_each_policy_that_goes_by_one() -> None:
    found = settings_of("cacheblend, first,none", [0.1, 0.3], CONFIG)
    assert [(setting.label, setting.policy) for setting in found[:3]] == [
        ("cacheblend 0.1", CacheBlend(0.1)), ("cacheblend 0.3", CacheBlend(0.3)), ("first", First())]
    assert [setting.ratio for setting in found] == [0.1, 0.3, None, None]
    assert [setting.label for setting in settings_of("first,first", [], CONFIG)] == ["first"], "each once"


def test_policies_may_have_settings() -> None:
    found = settings_of("query:reach=0:layers=[0.3, 1],first:tokens=8,cacheblend:ratio=0.4", [0.1], CONFIG)
    assert [setting.policy for setting in found] == [Query(0.1, layers=(0.3, 1.0), reach=0), First(8), CacheBlend(0.4)]
    assert [setting.label for setting in found] == ["query:reach=0:layers=[0.3, 1] 0.1", "first:tokens=8",
                                                    "cacheblend:ratio=0.4"]
    assert [setting.label for setting in settings_of("query: ratio = 0.3", [], CONFIG)] == ["query: ratio = 0.3"]


def test_plain_is_there_anyway() -> None:
    assert [setting.name for setting in settings_of("plain,full", [], CONFIG)] == ["full"]


@pytest.mark.parametrize(("policies", "said"), [
    ("magic", "there is no policy 'magic'"), ("", "no policy is named"), ("plain", "no policy is named"),
    ("query:speed=1", "no setting speed"), ("query:ratio=2", "ratio"), ("query:reach", "write it as query:reach=0"),
    ("default:ratio=0.1", "takes no settings"), ("plain:ratio=1", "takes no settings"),
    ("query:reach=[", "write it as"), ("query:policy=none", "names two policies"), ("query:reach=.inf", "reach"),
    ("query:self=1", "no setting self"),
])
def test_what_makes_no_sense_is_refused(policies: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(policies, [], CONFIG)
