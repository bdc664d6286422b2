"""Profiles: kept in a store's folder, used where nothing else is set, and never a reason to approximate too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blendrag import BlendConfig
from blendrag.errors import ConfigError, StoreError
from blendrag.policies import CacheBlend, Exact, Query
from blendrag.profile import Profile, default_policy, load_profile, make_room, profile_path
from blendrag.runtime.messages import ModelFacts
from blendrag.runtime.planning.planner import Planner
from blendrag.runtime.serving import arguments
from blendrag.store import ChunkStore
from tests.helpers import make_request
from tests.test_planner import PROMPT, SPAN_A, SPAN_B, A, B, put

FINGERPRINT = "26958503633596920b007968b88fd27d"
FOUND = Query(ratio=0.32, layers=(0.33, 0.66), over_rows="mean")


def profile(**changes: Any) -> Profile:
    known: dict[str, Any] = {
        "fingerprint": FINGERPRINT, "model": "m", "policy": FOUND, "target": {"max_kl": 0.1},
        "questions": 40, "made": "2026-11-30T10:00:00+00:00"}
    return Profile(**(known | changes))


def test_what_is_saved_is_loaded_by_its_fingerprint(tmp_path: Path) -> None:
    made = profile(curve=[{"rows": 0.1, "kl": 0.2}], advice=["More questions."])
    path = made.save(tmp_path / "store")
    assert path == profile_path(tmp_path / "store", FINGERPRINT)
    assert load_profile(tmp_path / "store", FINGERPRINT) == made
    assert load_profile(tmp_path / "store", "another") is None
    assert load_profile(tmp_path / "elsewhere", FINGERPRINT) is None
    assert default_policy(BlendConfig(store_path=tmp_path / "store"), FINGERPRINT) == (FOUND, True)


def test_a_new_profile_replaces_the_old_one_and_leaves_no_other_file(tmp_path: Path) -> None:
    profile().save(tmp_path)
    path = profile(policy=None).save(tmp_path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert default_policy(BlendConfig(store_path=tmp_path), FINGERPRINT) == (Exact(), True)


def test_a_profile_of_another_model_is_not_used(tmp_path: Path) -> None:
    path = profile(fingerprint="of another", model="other").save(tmp_path)
    path.rename(profile_path(tmp_path, FINGERPRINT))
    with pytest.raises(ConfigError, match="it is of another model, other"):
        load_profile(tmp_path, FINGERPRINT)
    assert default_policy(BlendConfig(store_path=tmp_path), FINGERPRINT) == (Exact(), True)


def test_a_profile_that_is_nested_too_deeply_is_a_damaged_one(tmp_path: Path) -> None:
    path = profile().save(tmp_path)
    path.write_text("[" * 100_000)
    assert default_policy(BlendConfig(store_path=tmp_path), FINGERPRINT) == (Exact(), True)


def test_room_for_a_profile_is_made_beforehand(tmp_path: Path) -> None:
    make_room(tmp_path)
    assert (tmp_path / "profiles").is_dir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "profiles").touch()
    with pytest.raises(StoreError, match=r"profiles is not a folder: set another store_path"):
        make_room(tmp_path / "elsewhere")


def test_a_store_beside_its_profiles_opens_again(tmp_path: Path) -> None:
    ChunkStore(tmp_path).close()
    path = profile().save(tmp_path)
    ChunkStore(tmp_path).close()
    assert path.is_file()


@pytest.mark.parametrize("settings", [{"policy": "query"}, {"ratio": 0.15}, {"policy_settings": {"reach": 0}},
                                      {"profile": False}])
def test_what_is_set_wins_even_where_it_is_the_default(settings: dict[str, Any], tmp_path: Path) -> None:
    profile().save(tmp_path)
    config = BlendConfig(store_path=tmp_path, **settings)
    for known in (config, BlendConfig(**json.loads(json.dumps(config.model_dump(mode="json"))))):
        assert default_policy(known, FINGERPRINT) == (config.make_policy(), False)


def test_a_variable_that_is_set_wins_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile().save(tmp_path)
    monkeypatch.setenv("BLENDRAG_POLICY", "cacheblend")
    assert default_policy(BlendConfig(store_path=tmp_path), FINGERPRINT) == (CacheBlend(), False)


def test_another_process_knows_that_nothing_was_set(tmp_path: Path) -> None:
    profile().save(tmp_path)
    config = BlendConfig(store_path=tmp_path)
    for dump in (config.model_dump(mode="json"), json.loads(config.model_dump_json())):
        assert BlendConfig(**dump).uses_profile
    [transfer] = [json.loads(word) for word in arguments("m", config) if word.startswith("{")]
    assert BlendConfig(**transfer["kv_connector_extra_config"]).uses_profile


@pytest.mark.parametrize(("measured", "used"), [(None, 64), (64, None), (64, 256)])
def test_what_was_measured_with_another_attention_proves_nothing(measured: int | None, used: int | None, tmp_path: Path,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    profile(sparse_attention=measured).save(tmp_path)
    for attention, policy in ((measured, FOUND), (used, Exact())):
        config = BlendConfig(store_path=tmp_path, sparse_attention=attention)
        assert default_policy(config, FINGERPRINT) == (policy, True)
    assert f"sparse_attention={measured}, not {used}" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"policy": {"policy": "nope"}}', "\x00"])
def test_a_damaged_profile_may_have_forbidden_blending(content: str, tmp_path: Path,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    path = profile().save(tmp_path)
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"run `blendrag calibrate` again, or delete it"):
        load_profile(tmp_path, FINGERPRINT)
    assert default_policy(BlendConfig(store_path=tmp_path), FINGERPRINT) == (Exact(), True)
    assert str(path) in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/profiles is not a folder"):
        profile().save(tmp_path / "file")


def planner(tmp_path: Path, **settings: Any) -> Planner:
    found = Planner(BlendConfig(store_path=tmp_path, **settings), ChunkStore())
    found.know(ModelFacts(FINGERPRINT, 4))
    for ids in (A, B):
        put(found, ids, fingerprint=FINGERPRINT)
    return found


def test_requests_that_name_no_policy_get_the_profiles(tmp_path: Path) -> None:
    profile().save(tmp_path)
    known = planner(tmp_path)
    spans = [list(SPAN_A), list(SPAN_B)]
    unnamed, named = (known.plan(make_request(PROMPT), spans, policy) for policy in (None, {"policy": "query"}))
    assert unnamed is not None
    assert (unnamed.policy, unnamed.stats.calibrated, unnamed.stats.policy) == (FOUND, True, "query")
    assert named is not None
    assert (named.policy, named.stats.calibrated) == (Query(), False)
    assert unnamed.salt != named.salt


def test_without_a_setting_that_is_good_enough_nothing_approximate_is_reused(tmp_path: Path) -> None:
    profile(policy=None).save(tmp_path)
    found = planner(tmp_path).plan(make_request(PROMPT), [list(SPAN_A), list(SPAN_B)])
    assert found is not None
    assert not found.placements
    assert (found.stats.policy, found.stats.calibrated) == ("exact", True)
    assert {chunk.reason for chunk in found.stats.chunks} == {"approximate"}
