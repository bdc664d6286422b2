"""Which requests share stored chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError
from blendrag.runtime.planning.scope import scope_of

SHARED = BlendConfig()
TENANTS = BlendConfig(tenants=Path("tenants.yaml"))


def test_without_a_salt_a_scope_is_the_namespace() -> None:
    assert scope_of(SHARED, None) == scope_of(SHARED, "") == "default"
    assert scope_of(BlendConfig(namespace="team/a"), None) == "team/a"


@settings(deadline=None)
@given(st.text(st.characters(), min_size=1), st.text(st.characters(), min_size=1))
def test_different_salts_are_different_scopes_that_no_namespace_spells(one: str, other: str) -> None:
    scope = scope_of(SHARED, one)
    assert (scope == scope_of(SHARED, other)) == (one == other)
    assert scope != scope_of(BlendConfig(namespace="other"), one)
    with pytest.raises(ConfigError, match="namespace"):
        BlendConfig(namespace=scope)


def test_a_salt_is_not_stored() -> None:
    assert "secret" not in str(scope_of(SHARED, "a secret"))


def test_a_tenants_requests_are_in_its_namespace_and_others_in_none() -> None:
    assert scope_of(TENANTS, "blendrag-tenant:acme:") == scope_of(BlendConfig(namespace="acme"), None)
    assert scope_of(TENANTS, "blendrag-tenant:acme:a:b") == scope_of(BlendConfig(namespace="acme"), "a:b")
    for salt in (None, "", "acme", "blendrag-tenant:", "blendrag-tenant:acme", "blendrag-tenant::x"):
        assert scope_of(TENANTS, salt) is None


def test_without_tenants_a_tenants_tag_is_a_salt_like_any_other() -> None:
    scope = scope_of(SHARED, "blendrag-tenant:acme:")
    assert scope is not None
    assert scope.startswith("default:")


@pytest.mark.parametrize("namespace", ["a:b", "a\nb", "a\x00"])
def test_a_namespace_that_could_spell_a_scope_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace: it holds ':' or a control character: use letters"):
        BlendConfig(namespace=namespace)


def test_an_engine_in_a_program_has_no_clients_to_restrain() -> None:
    config = BlendConfig(tenants=Path("tenants.yaml"), client_policy=False, statistics="none", namespace="team")
    embedded = config.embedded()
    assert (embedded.tenants, embedded.client_policy, embedded.statistics) == (None, True, "chunks")
    assert scope_of(embedded, None) == "team"
    assert embedded.uses_profile == config.uses_profile
