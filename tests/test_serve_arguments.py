"""`blendrag serve` before anything is loaded: what it makes of options, and what it says of bad ones."""

import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from blendrag import BlendConfig
from blendrag.cli import app
from blendrag.cli import serve as command
from blendrag.errors import ConfigError
from blendrag.runtime import serving


def run(*arguments, **environment):
    result = CliRunner().invoke(app, ["serve", *arguments], env=environment)
    return result.exit_code, re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]", "", result.output))


@pytest.fixture
def started(monkeypatch):
    """The command lines that vLLM's server would be started with."""
    found = []
    monkeypatch.setattr(serving, "serve", lambda arguments: found.append(list(arguments)))
    monkeypatch.setattr(command, "prepare", lambda verbose: {"enforce_eager": True})
    return found


def settings_in(arguments):
    return json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]


def test_help_needs_nothing_but_the_command():
    code, text = run("--help")
    assert code == 0
    for words in ("Usage:", "--store", "--populate", "--policy", "--ratio", "--settings", "`vllm serve`", "documents"):
        assert words in text
    assert "Traceback" not in text


def test_options_of_ours_become_settings_and_the_rest_goes_to_vllm(started, tmp_path):
    code, text = run("model", "--port", "8001", "--policy", "first", "-tp", "2", "--store", str(tmp_path / "kv"),
                     "--ram-bytes", "1GiB", "--max-model-len=4096")
    assert code == 0, text
    [arguments] = started
    assert arguments[0] == "model"
    assert arguments[-5:] == ["--port", "8001", "-tp", "2", "--max-model-len=4096"]
    assert "--enable-prompt-tokens-details" in arguments
    assert "--enforce-eager" in arguments
    assert arguments[arguments.index("--middleware") + 1] == "blendrag.serve.DocumentsMiddleware"
    found = BlendConfig(**settings_in(arguments))
    assert found == BlendConfig(policy="first", store_path=tmp_path / "kv", ram_bytes="1GiB", populate="on_miss",
                                disk_bytes=found.disk_bytes)


def test_settings_come_from_variables_and_files_too(started, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("populate: never\npolicy: none\nmin_chunk_tokens: 20\n")
    run("model", BLENDRAG_POPULATE="never", BLENDRAG_NAMESPACE="team")
    run("model", "--settings", str(file), "--policy", "first")
    run("model", BLENDRAG_POPULATE="never", BLENDRAG_POLICY="none")
    names = "populate", "policy", "namespace", "min_chunk_tokens"
    assert [[settings_in(arguments).get(name) for name in names] for arguments in started] == [
        ["never", None, "team", 16], ["never", "first", "default", 20], ["never", "none", "default", 16]]


def test_a_store_may_grow_by_half_of_what_is_free_unless_a_limit_is_set(started, tmp_path, monkeypatch):
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**30))
    file = tmp_path / "settings.yaml"
    file.write_text("disk_bytes: null\n")
    _, text = run("model", "--store", str(tmp_path / "kv"))
    run("model", "--store", str(tmp_path / "kv"), "--disk-bytes", "1GiB")
    run("model", "--store", str(tmp_path / "kv"), "--settings", str(file))
    run("model")
    limits = [settings_in(arguments).get("disk_bytes") for arguments in started]
    assert limits[0] >= 50 * 2**30
    assert limits[1:] == [2**30, None, None]
    assert "--disk-bytes sets another limit" in text


def test_tenants_are_read_before_a_model_is_loaded(started, tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("- {name: Red, namespace: red, api_keys: a-long-secret-key}\n")
    file.chmod(0o644)
    assert "chmod 600" in run("model", "--tenants", str(file))[1]
    file.chmod(0o600)
    assert "their keys alone are asked for" in run("model", "--tenants", str(file), "--api-key", "other")[1]
    assert "their keys alone are asked for" in run("model", "--tenants", str(file), VLLM_API_KEY="other")[1]
    assert started == []
    run("model", "--tenants", str(file), "--no-client-policy", "--statistics", "totals")
    settings = settings_in(started[0])
    assert [settings[name] for name in ("tenants", "client_policy", "statistics")] == [str(file), False, "totals"]


def test_a_demo_model_is_served_under_its_name(started, smollm2):
    assert run("smollm2")[0] == 0
    [arguments] = started
    assert arguments[0] == str(smollm2)
    assert arguments[arguments.index("--served-model-name") + 1] == "smollm2"


@pytest.mark.parametrize(("arguments", "remedy"), [
    ([], "name the model first: blendrag serve MODEL"),
    (["--port", "8001", "model"], "name the model first: blendrag serve MODEL"),
    (["model", "--policy", "nope"], "choose one of "),
    (["model", "--populate", "nope"], "'never' or 'on_miss'"),
    (["model", "--ratio", "2"], "ratio"),
    (["model", "--statistics", "all"], "statistics: "),
    (["model", "--disk-bytes", "much"], "disk_bytes: "),
    (["model", "--tenants", "missing.yaml"], "check the path"),
    (["model", "--settings", "missing.yaml"], "check the path"),
    (["model", "--store", "/dev/null/kv"], "/dev/null"),
    (["model", "--worker-cls", "mine"], "--worker-cls is set by blendrag serve: leave it out"),
    (["model", "--kv_transfer_config={}"], "--kv-transfer-config is set by blendrag serve: leave it out"),
    (["model", "--kv-transfer-config.kv_role=kv_both"], "--kv-transfer-config is set by blendrag serve: leave it out"),
], ids=str)
def test_what_is_wrong_is_said_before_a_model_is_loaded(started, arguments, remedy):
    code, text = run(*arguments)
    assert (code, started) == (1, [])
    assert text.startswith("error: ")
    assert remedy in text


def test_a_users_own_option_wins():
    arguments = serving.arguments("model", BlendConfig(), ["--kv_cache_memory_bytes", "1G", "--shutdown-timeout", "0"])
    assert arguments.count("--shutdown-timeout") == 1
    assert "--kv-cache-memory-bytes" not in arguments
    assert arguments[-2:] == ["--shutdown-timeout", "0"]
    with pytest.raises(ConfigError):
        serving.arguments("model", BlendConfig(), ["--worker-cls=mine"])
