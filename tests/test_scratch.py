"""Folders and notes in the shared temp folder: no other user's doing stops an engine or leads it elsewhere."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from blendrag.errors import ConfigError, StoreError
from blendrag.policies import Full
from blendrag.profile import Profile, load_profile, profile_path
from blendrag.runtime.engine.failure import FailureNote, leave_notes
from blendrag.runtime.engine.scratch import Scratch, scratch_folder
from blendrag.store import ChunkStore
from tests.hostile import PUT
from tests.test_store_entry import make_entry, put


@pytest.fixture(autouse=True)
def temp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_scratch_folder_is_its_users_alone_and_gone_at_the_end(temp):
    path = scratch_folder("engine")
    with ChunkStore(path) as store:  # the workers come before the scheduler side, which owns the folder
        put(store, 1, make_entry(1))
        scratch = Scratch(scratch_folder("engine"))
        assert mode(path) == 0o700
        assert {mode(file) for file in path.rglob("*") if file.is_file()} == {0o600}
        with pytest.raises(StoreError, match="another engine uses it"):
            Scratch(path)
    scratch.close()
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize("kind", PUT)
def test_what_others_put_beside_a_scratch_folder_stops_nothing(temp, kind):
    another, mine = temp / f"blendrag-{os.getuid()}-another", temp / f"blendrag-{os.getuid()}-mine"
    for folder, permissions in ((another, 0o777), (mine, 0o700)):
        folder.mkdir()
        folder.chmod(permissions)
        PUT[kind](folder / "owner.lock")
    PUT[kind](temp / f"blendrag-{os.getuid()}-x")
    Scratch(scratch_folder("engine")).close()
    assert another.exists(), "a folder that others may enter is left alone"
    assert mine.exists() == (kind not in ("empty file", "huge file")), "an engine that was killed left it"


def test_a_scratch_folder_that_is_anothers_is_refused_with_the_remedy(temp):
    path = scratch_folder("engine")
    path.chmod(0o755)
    with pytest.raises(StoreError, match=r"it is not a folder of this user alone.*set store_path, or another folder"):
        scratch_folder("engine")
    path.rmdir()
    (temp / "elsewhere").mkdir(0o700)
    path.symlink_to(temp / "elsewhere")
    with pytest.raises(StoreError, match="it is not a folder of this user alone"):
        scratch_folder("engine")


@pytest.mark.parametrize("kind", PUT)
def test_something_else_in_a_scratch_folders_lock_is_refused(kind):
    path = scratch_folder("../engine")  # a user's own id
    assert path.parent == Path(tempfile.gettempdir())
    PUT[kind](path / "owner.lock")
    if kind in ("empty file", "huge file"):
        Scratch(path).close()
    else:
        with pytest.raises(StoreError, match=r"cannot be used .*: set store_path"):
            Scratch(path)


@pytest.mark.parametrize("kind", PUT)
def test_something_else_in_a_notes_place_is_no_note(temp, kind):
    note = FailureNote("engine")
    path = temp / "blendrag-engine.failure"
    assert mode(path) == 0o600
    path.unlink()
    PUT[kind](path)
    leave_notes("another")
    assert note.read() is None


@pytest.mark.parametrize("kind", PUT)
def test_something_else_in_a_profiles_place_is_an_error_with_the_remedy(tmp_path, kind):
    saved = Profile("model", "a model", Full(), {}, 10, "2026-01-01").save(tmp_path)
    assert (mode(saved), mode(saved.parent)) == (0o600, 0o700)
    assert load_profile(tmp_path, "model")
    saved.unlink()
    PUT[kind](profile_path(tmp_path, "model"))
    with pytest.raises(ConfigError, match="run `blendrag calibrate` again, or delete it"):
        load_profile(tmp_path, "model")
