"""The benchmark of the front end plans prompts of which all chunks are found."""

from typer.testing import CliRunner

from blendrag.bench.cli import app


def test_the_command_prints_what_each_way_of_marking_costs(tmp_path):
    result = CliRunner().invoke(app, ["plan", "--chunks", "3", "--chunk-tokens", "40", "--repeats", "2",
                                      "--store", str(tmp_path / "store")])
    assert result.exit_code == 0, result.output
    for step in ["tokenising, all chunks new", "tokenising, chunks known", "planning, spans",
                 "planning, nothing marked", "planning, documents, as texts", "planning, documents, as token ids"]:
        assert step in result.output
    assert "3 stored chunks" in result.output
    assert "cores, load" in result.output
