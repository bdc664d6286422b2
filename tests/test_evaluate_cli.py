"""`blendrag eval` before it loads a model: what it is told, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blendrag import BlendConfig
from blendrag.cli import app
from blendrag.cli import eval as command
from blendrag.evaluate import conversations_of, engine_arguments, load_questions, shuffled
from blendrag.evaluate.ask import TOP_TOKENS
from blendrag.runtime.engine.options import engine_options

DATA = str(Path(__file__).parent.parent / "examples/data/multihop.json")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would measure; its logging and environment are left as they are."""
    found: dict[str, Any] = {}

    def run_eval(*args: Any) -> Any:
        names = ("model", "dataset", "questions", "settings", "config", "tokens", "json", "html", "console", "engine",
                 "turns")
        found.update(zip(names, args, strict=True))
        return type("Found", (), {"interrupted": False, "failures": []})

    monkeypatch.setattr(command, "run_eval", run_eval)
    monkeypatch.setattr(command, "prepare", lambda verbose: {})
    return found


def test_what_a_user_types_becomes_what_is_measured(told: dict[str, Any], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("of another time")
    typed = ["--data", DATA, "--policies", "default,cacheblend", "--ratio", "0.1", "--ratio", "0.3", "--limit", "2",
             "--json", str(figures), "--max-model-len", "4096"]
    done = CliRunner().invoke(app, ["eval", "m", *typed])
    assert done.exit_code == 0, done.output
    assert [setting.label for setting in told["settings"]] == ["default 0.15", "cacheblend 0.1", "cacheblend 0.3"]
    assert (told["model"], told["dataset"], len(told["questions"])) == ("m", DATA, 2)
    assert told["engine"] == {"max_model_len": 4096}
    assert figures.read_text() == "of another time", "until there is something better"
    listed = told["questions"]
    assert CliRunner().invoke(app, ["eval", "m", *typed, "--shuffle", "7"]).exit_code == 0
    assert told["questions"] == shuffled(listed, 7)
    assert told["dataset"] == f"{DATA}, shuffled with seed 7"
    assert told["turns"] is False


def test_questions_become_conversations(told: dict[str, Any]) -> None:
    typed = ["--data", DATA, "--limit", "3", "--turns", "2", "--shuffle", "7"]
    assert CliRunner().invoke(app, ["eval", "m", *typed]).exit_code == 0
    assert told["turns"] is True
    assert told["questions"] == shuffled(conversations_of(load_questions(Path(DATA), 3), 2), 7)
    assert told["dataset"] == f"{DATA}, in conversations of 2 turns, shuffled with seed 7"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--data", "none.json"], "cannot be read"),
    (["--data", DATA, "--policies", "magic"], "there is no policy 'magic'"),
    (["--data", DATA, "--html", "/nowhere/report.html"], "cannot be written"),
    (["--data", DATA, "--limit", "1", "--turns", "2"], "no 2 questions with answers of their own"),
    (["--data", DATA, "--html", "same", "--json", "same"], "give each a file of its own"),
])
def test_what_cannot_work_is_refused_at_once(told: dict[str, Any], arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["eval", "m", *arguments])
    assert done.exit_code == 1
    assert said in done.output
    assert not told


def test_engine_options_are_those_that_were_given() -> None:
    assert engine_options([]) == {}
    assert engine_options(["--max-model-len", "4096", "--dtype=float32", "--enforce-eager"]) == {
        "max_model_len": 4096, "dtype": "float32", "enforce_eager": True}
    with pytest.raises(SystemExit):
        engine_options(["--no-such-option"])


def test_forcing_needs_a_processor_and_logprobs() -> None:
    [processor] = engine_arguments({})["logits_processors"]
    assert engine_arguments({"logits_processors": ["mine:One"], "max_logprobs": 10}) == {
        "logits_processors": ["mine:One", processor], "max_logprobs": TOP_TOKENS}
    assert engine_arguments({"max_logprobs": -1})["max_logprobs"] == -1


def test_a_quality_guard_does_not_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BlendConfig] = []

    def start(model: str, *, config: BlendConfig, **engine_args: Any) -> None:
        seen.append(config)
        raise InterruptedError

    monkeypatch.setattr("blendrag.engine.BlendEngine", start)
    guarded = BlendConfig(quality_guard={"share": 1.0}, ratio=0.3)
    with pytest.raises(InterruptedError):
        command.run_eval("m", "data", [], [], guarded, 32, None, None, Console(), {})
    assert (seen[0].quality_guard, seen[0].ratio) == (None, 0.3)
