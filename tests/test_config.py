"""Settings come from keywords, the environment, YAML and LMCache's YAML; what is wrong is said in one sentence."""

import json
import logging
from pathlib import Path

import pytest

from blendrag.config import BlendConfig
from blendrag.errors import ConfigError
from blendrag.policies import CacheBlend, First, NoRecompute, Query
from tests.engine.policies import Last

GIB = 2**30


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text, "utf-8")
        return path

    return write


def test_the_defaults_blend_by_the_question_in_host_ram():
    config = BlendConfig()
    assert config.make_policy() == Query()
    assert (config.delimiter, config.keep_delimiter, config.min_chunk_tokens) == (None, False, 16)
    assert (config.store_path, config.ram_bytes, config.namespace) == (None, 4 * GIB, "default")
    assert config.disk_bytes is None


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        BlendConfig().ratio = 0.5


@pytest.mark.parametrize(("settings", "said"), [
    ({"polcy": "query"}, "there is no setting 'polcy': choose from policy, ratio, "),
    ({"policy": "nope"}, "there is no policy 'nope': choose one of exact, full, none, first, cacheblend, query"),
    ({"policy": ["first"]}, "policy"),
    ({"policy_settings": {"tokens": 3}}, "policy 'query' has no setting tokens: it takes layers, over_rows, ratio"),
    ({"policy_settings": {"layers": [0.5, 2]}}, "policy 'query': layers.1: input should be less than or equal to 1"),
    ({"policy_settings": {"policy": "first"}}, "policy"),
    ({"ratio": 1.5}, "ratio: .*1.5"),
    ({"ratio": -0.1}, "ratio: .*-0.1"),
    ({"ratio": float("nan")}, "ratio: .*nan"),
    ({"ratio": "much"}, "ratio: .*'much'"),
    ({"delimiter": ""}, "delimiter"),
    ({"keep_delimiter": True}, "set delimiter, too"),
    ({"namespace": ""}, "namespace"),
    ({"min_chunk_tokens": 0}, "min_chunk_tokens"),
    ({"ram_bytes": -1}, "ram_bytes"),
    ({"ram_bytes": "lots"}, "ram_bytes: .*'lots'"),
    ({"disk_bytes": -1}, "disk_bytes"),
    ({"disk_bytes": "lots"}, "disk_bytes: .*'lots'"),
])
def test_a_wrong_setting_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        BlendConfig(**settings)


@pytest.mark.parametrize(("size", "count"), [("4GiB", 4 * GIB), ("1.5 GB", 1_500_000_000), (123, 123), ("0", 0)])
def test_sizes_are_numbers_or_text(size, count):
    assert BlendConfig(ram_bytes=size).ram_bytes == count
    assert BlendConfig(disk_bytes=size).disk_bytes == count


def test_the_home_folder_is_spelled_out():
    assert BlendConfig(store_path="~/chunks").store_path == Path.home() / "chunks"


def test_settings_survive_the_way_to_the_connector_as_json():
    config = BlendConfig(policy="query", ratio=0.3, policy_settings={"layers": (0.2, 0.8)}, delimiter=" # # ",
                         store_path="/tmp/chunks", ram_bytes="1GiB", disk_bytes="2GiB", gpu_bytes="3GiB",
                         namespace="a", keep_delimiter=True)
    again = BlendConfig(**json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again.make_policy() == config.make_policy() == Query(ratio=0.3, layers=(0.2, 0.8))
    assert again.model_dump(exclude={"policy_settings"}) == config.model_dump(exclude={"policy_settings"})


# The environment.


def test_the_environment_replaces_defaults_and_keywords_replace_the_environment(monkeypatch):
    monkeypatch.setenv("BLENDRAG_POLICY", "first")
    monkeypatch.setenv("BLENDRAG_POLICY_SETTINGS", '{"tokens": 8}')
    monkeypatch.setenv("BLENDRAG_RAM_BYTES", "2GiB")
    monkeypatch.setenv("BLENDRAG_DELIMITER", "##")
    monkeypatch.setenv("BLENDRAG_KEEP_DELIMITER", "true")
    config = BlendConfig()
    assert (config.make_policy(), config.ram_bytes, config.keep_delimiter) == (First(tokens=8), 2 * GIB, True)
    assert BlendConfig(ram_bytes=5).ram_bytes == 5
    assert BlendConfig(policy_settings={"tokens": 9}).make_policy() == First(tokens=9)


def test_keywords_replace_the_environments_mapping_and_do_not_mix_with_it(monkeypatch):
    monkeypatch.setenv("BLENDRAG_POLICY", "first")
    monkeypatch.setenv("BLENDRAG_POLICY_SETTINGS", '{"tokens": 8}')
    config = BlendConfig(policy="query", policy_settings={"over_rows": "mean"})
    assert config.make_policy() == Query(over_rows="mean")
    assert BlendConfig(policy="none", policy_settings={}).make_policy() == NoRecompute()


@pytest.mark.parametrize(("name", "value"), [
    ("RATIO", "7"), ("POLICY", "nope"), ("POLICY_SETTINGS", "no json"), ("POLICY_SETTINGS", "[1]"),
    ("RAM_BYTES", "lots"),
])
def test_a_wrong_variable_is_a_config_error_too(monkeypatch, name, value):
    monkeypatch.setenv(f"BLENDRAG_{name}", value)
    with pytest.raises(ConfigError, match=name.lower()):
        BlendConfig()


@pytest.mark.parametrize("name", ["RATIO", "STORE_PATH", "POLICY", "POLICY_SETTINGS", "NAMESPACE"])
def test_an_empty_variable_counts_as_unset(monkeypatch, name):
    monkeypatch.setenv(f"BLENDRAG_{name}", "")
    assert BlendConfig() == BlendConfig(policy="query", ratio=None, policy_settings={}, store_path=None,
                                        namespace="default")


def test_variables_of_other_parts_do_not_matter(monkeypatch):
    monkeypatch.setenv("BLENDRAG_MODELS", "/somewhere")
    assert BlendConfig().make_policy() == Query()


# The policy of a request.


def test_a_request_overrides_the_ratio_and_other_settings():
    config = BlendConfig(ratio=0.2, policy_settings={"over_rows": "mean"})
    assert config.make_policy() == Query(ratio=0.2, over_rows="mean")
    assert config.make_policy(ratio=0.4) == Query(ratio=0.4, over_rows="mean")
    assert config.make_policy(ratio=None, layers=[0, 1]) == Query(ratio=0.2, over_rows="mean", layers=(0, 1))


def test_ratios_of_several_check_layers_are_for_the_policy_that_has_them():
    config = BlendConfig(policy="cacheblend", ratio=[0.3, 0.1], policy_settings={"check_layers": [1, 2]})
    again = BlendConfig(**json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again.make_policy() == config.make_policy() == CacheBlend((0.3, 0.1), (1, 2))
    assert config.make_policy(ratio=[0.5, 0.2]) == CacheBlend((0.5, 0.2), (1, 2))
    assert config.make_policy(ratio=0.5) == CacheBlend(0.5, (1, 2))
    assert config.make_policy(policy="query") == Query()


def test_another_policy_starts_from_its_own_defaults_but_keeps_the_ratio():
    config = BlendConfig(ratio=0.2, policy_settings={"over_rows": "mean"})
    assert config.make_policy(policy="cacheblend") == CacheBlend(ratio=0.2)
    assert config.make_policy(policy="first", tokens=4) == First(tokens=4)
    assert config.make_policy(policy={"policy": "cacheblend", "deviation": "v"}) == CacheBlend(ratio=0.2, deviation="v")
    assert config.make_policy(policy={"over_rows": "norm"}) == Query(ratio=0.2)


def test_a_policy_object_is_taken_as_it_is_and_what_is_given_beside_it_counts():
    config = BlendConfig(ratio=0.2)
    assert config.make_policy(policy=Query(ratio=0.9)) == Query(ratio=0.9)
    assert config.make_policy(policy=Query(over_rows="mean"), ratio=0.4) == Query(ratio=0.4, over_rows="mean")
    with pytest.raises(ConfigError, match="no setting ratio"):
        config.make_policy(policy=First(), ratio=0.4)


@pytest.mark.parametrize("overrides", [
    {"policy": "first", "ratio": 0.4}, {"ratio": 2}, {"ratio": "x"}, {"polcy": 1}, {"policy": ""}, {"policy": 3},
    {"policy": ["first"]}, {"policy": {"policy": ["first"]}}, {"policy": {"policy": None}}, {"policy": {1: 2}},
])
def test_a_wrong_override_is_a_config_error(overrides):
    with pytest.raises(ConfigError):
        BlendConfig().make_policy(**overrides)


# YAML.


def test_a_yaml_file_holds_settings_by_name_and_overrides_win(yaml_file, monkeypatch):
    path = yaml_file("policy: cacheblend\nratio: 0.3\npolicy_settings: {deviation: v}\nram_bytes: 2GiB\n")
    monkeypatch.setenv("BLENDRAG_RATIO", "0.9")
    config = BlendConfig.from_yaml(path)
    assert (config.make_policy(), config.ram_bytes) == (CacheBlend(ratio=0.3, deviation="v"), 2 * GIB)
    assert BlendConfig.from_yaml(str(path), ratio=0.5).make_policy() == CacheBlend(ratio=0.5, deviation="v")


def test_an_empty_file_is_the_defaults(yaml_file):
    assert BlendConfig.from_yaml(yaml_file("# nothing set\n")) == BlendConfig()


NO_MAPPING = ["- a\n- b\n", "just text\n", "a: [\n", "1: 2\n", "? [a, b]\n: c\n", "!!python/object:os.system x\n"]


@pytest.mark.parametrize("text", [*NO_MAPPING, "ratio: 3\n", "polcy: query\n", "policy_settings: {1: 2}\n"])
def test_a_file_of_anything_else_is_refused(yaml_file, text):
    with pytest.raises(ConfigError):
        BlendConfig.from_yaml(yaml_file(text))


@pytest.mark.parametrize("text", NO_MAPPING)
def test_an_lmcache_file_of_anything_else_is_refused(yaml_file, text):
    with pytest.raises(ConfigError):
        BlendConfig.from_lmcache(yaml_file(text))


def test_files_that_cannot_be_read_are_refused_with_their_path(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"namespace: caf\xe9\n")
    for path in (tmp_path, tmp_path / "missing.yaml", tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match=f"{path} cannot be read"):
            BlendConfig.from_yaml(path)


# LMCache's YAML.


def from_lmcache(yaml_file, text, caplog):
    """The settings, and the warnings that reading them gave."""
    with caplog.at_level(logging.WARNING):
        config = BlendConfig.from_lmcache(yaml_file(text))
    return config, [record.getMessage() for record in caplog.records]


def test_a_usual_lmcache_file_is_understood_without_a_word(yaml_file, caplog):
    config, warnings = from_lmcache(yaml_file, """
        local_cpu: true
        max_local_cpu_size: 2.5
        local_disk: "file:///mnt/chunks/"
        enable_blending: true
        blend_special_str: " ## "
        blend_recompute_ratios: 0.2
        blend_check_layers: 2
        blend_min_tokens: 64
        """, caplog)
    assert config.make_policy() == CacheBlend(ratio=0.2, check_layers=2, deviation="k")
    assert (config.delimiter, config.min_chunk_tokens, config.ram_bytes) == (" ## ", 64, int(2.5 * GIB))
    assert config.store_path == Path("/mnt/chunks")
    assert warnings == []


def test_what_an_lmcache_file_leaves_out_has_lmcaches_default(yaml_file, caplog):
    config, warnings = from_lmcache(yaml_file, "enable_blending: true\n", caplog)
    assert config.make_policy() == CacheBlend(deviation="k")
    assert (config.delimiter, config.ram_bytes, config.store_path) == (" # # ", 5 * GIB, None)
    assert warnings == []


def test_every_setting_without_a_counterpart_is_named_in_one_warning(yaml_file, caplog):
    ignored = ["blend_thresholds", "chunk_size", "extra_config", "max_local_disk_size", "remote_serde", "remote_url",
               "save_decode_cache", "use_layerwise"]
    text = "\n".join(["enable_blending: true", "blend_recompute_ratios: [0.15]", *(f"{name}: 1" for name in ignored)])
    _, warnings = from_lmcache(yaml_file, text, caplog)
    assert len(warnings) == 1
    assert warnings[0].endswith(": " + ", ".join(ignored))


@pytest.mark.parametrize(("text", "policy"), [
    ("blend_recompute_ratios: [0.3]", CacheBlend(ratio=0.3)),
    ("blend_recompute_ratios: '0.3'", CacheBlend(ratio=0.3)),
    ("blend_recompute_ratios: null", CacheBlend()),
    ("blend_check_layers: [3]", CacheBlend(check_layers=3)),
    ("blend_check_layers: '3'", CacheBlend(check_layers=3)),
    ("blend_check_layers: '2, 5'", CacheBlend(check_layers=(2, 5))),
    ("blend_check_layers: [2, 5]\nblend_recompute_ratios: '0.3,0.1'", CacheBlend((0.3, 0.1), (2, 5))),
    ("blend_check_layers: [2, 5]\nblend_recompute_ratios: 0.3", CacheBlend(0.3, (2, 5))),
])
def test_lmcaches_lists_may_have_any_of_its_forms(yaml_file, caplog, text, policy):
    config, warnings = from_lmcache(yaml_file, text, caplog)
    assert (config.make_policy(), warnings) == (policy, [])


@pytest.mark.parametrize(("disk", "path"), [
    ("file:///mnt/chunks/", "/mnt/chunks"),
    ("file://chunks/", "chunks"),
    ("file://local/chunks/", "local/chunks"),
    ("file:///mnt/a#b?c%20d/", "/mnt/a#b?c%20d"),
    ("/mnt/chunks", "/mnt/chunks"),
    ("chunks", "chunks"),
])
def test_the_disk_is_the_folder_that_lmcache_would_use(yaml_file, caplog, disk, path):
    config, _ = from_lmcache(yaml_file, f"local_disk: '{disk}'\n", caplog)
    assert config.store_path == Path(path)


@pytest.mark.parametrize(("text", "said"), [
    ("blend_recompute_ratios: 1.5", "ratio"),
    ("blend_recompute_ratios: []", "blend_recompute_ratios"),
    ("blend_recompute_ratios: [0.3, 0.1]", "ratio: 2 ratios for 1 check layers"),
    ("blend_recompute_ratios: {a: 1}", "blend_recompute_ratios"),
    ("blend_check_layers: [x]", "blend_check_layers"),
    ("blend_check_layers: [-1]", "check_layer"),
    ("blend_check_layers: [1.5]", "blend_check_layers"),
    ("blend_check_layers: [1, 2.5]", "blend_check_layers"),
    ("blend_check_layers: [.inf]", "blend_check_layers"),
    ("max_local_cpu_size: lots", "max_local_cpu_size"),
    ("max_local_cpu_size: {a: 1}", "max_local_cpu_size"),
    ("max_local_cpu_size: [1, 2]", "max_local_cpu_size"),
    ("blend_special_str: 3", "delimiter"),
    ("blend_min_tokens: many", "min_chunk_tokens"),
])
def test_a_value_that_lmcache_would_refuse_is_refused_by_name(yaml_file, text, said):
    with pytest.raises(ConfigError, match=said):
        BlendConfig.from_lmcache(yaml_file(text))


def test_overrides_win_over_an_lmcache_file(yaml_file):
    config = BlendConfig.from_lmcache(yaml_file("blend_recompute_ratios: 0.3\n"), ratio=0.5, namespace="a")
    assert (config.make_policy(), config.namespace) == (CacheBlend(ratio=0.5), "a")


# Policies of a user's own.


def test_policies_that_are_listed_can_be_named():
    config = BlendConfig(policies=["tests.engine.policies:Last"], policy="last", policy_settings={"tokens": 3})
    assert config.make_policy() == Last(tokens=3)
    again = BlendConfig(**config.model_dump(mode="json"))
    assert again.make_policy() == Last(tokens=3)
    again.check_travels(Last())
    again.check_travels(Query())
    with pytest.raises(ConfigError, match=r"do not know the policy class Last: name it in the setting policies, as "
                                          r"tests\.engine\.policies:Last"):
        BlendConfig().check_travels(Last())
    assert BlendConfig().make_policy(policy=Last(), tokens=2) == Last(tokens=2)


def test_a_policy_that_cannot_be_imported_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"policies: the policy 'no\.such:Thing' cannot be imported"):
        BlendConfig(policies=["no.such:Thing"])
