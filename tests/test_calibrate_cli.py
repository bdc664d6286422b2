"""`blendrag calibrate` before it loads a model: what it is told, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blendrag.calibrate import Target
from blendrag.calibrate.sources import Generated, Given
from blendrag.cli import app
from blendrag.cli import calibrate as command
from blendrag.errors import DatasetError

EXAMPLES = Path(__file__).parent.parent / "examples/data"
DATA, SUMMARIES = str(EXAMPLES / "multihop.json"), str(EXAMPLES / "summaries.json")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would do; `chosen` is what it would find."""
    found: dict[str, Any] = {"chosen": "a setting"}

    def run_calibrate(*args: Any) -> Any:
        names = "model", "store", "source", "target", "config", "console", "engine", "json"
        found.update(zip(names, args, strict=True))
        return type("Found", (), {"chosen": found["chosen"]})

    monkeypatch.setattr(command, "run_calibrate", run_calibrate)
    monkeypatch.setattr(command, "prepare", lambda verbose: {})
    return found


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *arguments])


def test_what_a_user_types_becomes_what_is_searched_for(told: dict[str, Any], tmp_path: Path) -> None:
    done = run("m", "--store", str(tmp_path), "--data", DATA, "--min-top1", "0.5", "--questions", "11",
               "--max-model-len", "4096")
    assert done.exit_code == 0, done.output
    assert (told["model"], told["store"], told["target"]) == ("m", tmp_path, Target(min_top1=0.5))
    assert told["engine"] == {"max_model_len": 4096}
    assert len(told["source"].questions(None)) == 11


def test_the_target_is_a_kl_where_none_is_given_and_the_status_says_if_it_was_met(told: dict[str, Any]) -> None:
    told["chosen"] = None
    assert run("m", "--store", "s", "--data", DATA).exit_code == 3
    assert told["target"] == Target(max_kl=0.1)


@pytest.mark.parametrize(("arguments", "said"), [
    (["m", "--store", "s"], "give either --data FILE.json with questions, or --docs FOLDER"),
    (["m", "--store", "s", "--data", DATA, "--docs", "docs"], "give either --data"),
    (["--store", "s", "--data", DATA, "--max-model-len", "4096"], "name the model first"),
    (["m", "--store", "s", "--data", "none.json"], "cannot be read"),
    (["m", "--store", "s", "--data", DATA, "--max-kl", "0"], "max_kl is 0"),
    (["m", "--store", "s", "--data", DATA, "--max-kl", "inf"], "max_kl is inf"),
    (["m", "--store", "s", "--data", DATA, "--min-f1", "99"], "min_f1 is 99: it is a share"),
    (["m", "--store", "s", "--data", DATA, "--min-top1", "0.9"], "12 of 12 questions can be asked, and a top-1 "
     "agreement of 0.9 takes 58 to prove"),
    (["m", "--store", "s", "--data", SUMMARIES], "6 of 6 questions can be asked, and 10 are needed"),
    (["m", "--store", "s", "--docs", "docs", "--min-f1", "0.9"], "min_f1 needs right answers"),
    (["m", "--store", "s", "--docs", "no-such-folder"], "no-such-folder does not exist"),
    (["m", "--store", "s", "--data", DATA, "--json", "/nowhere/profile.json"], "cannot be written"),
])
def test_what_cannot_work_is_refused_at_once(told: dict[str, Any], arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
    assert "target" not in told


def test_the_first_questions_are_taken_after_repeats_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "log.json"
    entries = json.loads(Path(DATA).read_text())
    data.write_text(json.dumps([*[entries[0]] * 30, *entries]))
    engine: Any = None  # it is not asked
    given = Given(data, 11, Target(max_kl=0.1))
    asked = given.questions(engine)
    assert given.repeats == 30
    assert [question.text for question in asked] == [entry["question"] for entry in entries[:11]]
    with pytest.raises(DatasetError, match=r"^11 of 41 questions can be asked \(the others came before\), and a top-1"):
        Given(data, 11, Target(min_top1=0.9))
    with pytest.raises(DatasetError, match=r"^11 of 11 questions can be asked, and a top-1"):
        Given(Path(DATA), 11, Target(min_top1=0.9))


def test_documents_that_are_too_short_to_ask_about_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("The lighthouse was built by Alan Marsh.")
    source = Generated(tmp_path, 60, 8, 256, Console(quiet=True))
    engine: Any = SimpleNamespace(tokens=SimpleNamespace(chunk_ids=str.split))
    with pytest.raises(DatasetError, match=r"make 1 chunks of 256 tokens.*10 are needed: give more, or a smaller --ch"):
        source.questions(engine)
