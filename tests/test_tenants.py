"""The tenants file of a server."""

import hashlib

import pytest
import yaml

from blendrag.errors import ConfigError
from blendrag.tenants import Keys, load_tenants

KEY, OTHER = "a-long-secret-key-1", "a-long-secret-key-2"


@pytest.fixture
def write(tmp_path):
    def write(content, mode=0o600):
        path = tmp_path / "tenants.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        path.chmod(mode)
        return path

    return write


def test_a_tenant_has_keys_a_namespace_and_limits(write):
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path = write([{"name": "Red", "namespace": "red", "api_keys": [KEY], "disk_bytes": "2GiB",
                   "requests_per_minute": 60},
                  {"name": "Blue", "namespace": "blue", "api_key_sha256": digest, "concurrent_requests": 2}])
    red, blue = load_tenants(path)
    assert (red.namespace, red.disk_bytes, red.requests_per_minute) == ("red", 2 * 2**30, 60)
    assert blue.concurrent_requests == 2
    keys = Keys([red, blue])
    assert (keys.find(KEY), keys.find(OTHER), keys.find(digest), keys.find("")) == (red, blue, None, None)
    assert KEY not in repr(red)


RED = {"name": "Red", "namespace": "red", "api_keys": [KEY]}


@pytest.mark.parametrize(("content", "remedy"), [
    ("", "write one `- name: ...`"),
    ("a: b", "write one `- name: ...`"),
    ("- [", "check the path and the syntax"),
    ([RED | {"namespace": "a:b"}], "tenant 0, namespace"),
    ([{"name": "Red", "namespace": "red"}], "neither api_keys nor api_key_sha256"),
    ([RED | {"api_keys": ["short"]}], "tenant 0, api_keys.0"),
    ([RED | {"api_key_sha256": "zz"}], "api_key_sha256"),
    ([RED | {"rate": 3}], "there is no such field: choose from"),
    ([RED | {"requests_per_minute": 0}], "requests_per_minute"),
    ([RED, RED | {"name": "Blue", "api_keys": [OTHER]}], "two tenants have the namespace 'red'"),
    ([RED, RED | {"namespace": "blue", "api_keys": [OTHER]}], "two tenants have the name 'Red'"),
    ([RED, RED | {"name": "Blue", "namespace": "blue"}], "an API key occurs twice"),
], ids=str)
def test_what_is_wrong_is_said_without_a_key(write, content, remedy):
    with pytest.raises(ConfigError) as caught:
        load_tenants(write(content))
    assert remedy in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="check the path"):
        load_tenants(tmp_path / "missing.yaml")


def test_other_users_may_neither_read_keys_nor_change_the_file(write, caplog):
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    hashed = [{"name": "Red", "namespace": "red", "api_key_sha256": [digest]}]
    for mode in (0o644, 0o660, 0o602):
        with pytest.raises(ConfigError, match="chmod 600"):
            load_tenants(write([RED], mode))
    assert load_tenants(write(hashed, 0o644))
    assert "chmod 600" in caplog.text
