"""The benchmark of finding chunks measures what it says it does."""

from typer.testing import CliRunner

from blendrag.bench.cli import app
from blendrag.bench.match import MatchBench


def test_prompts_are_made_of_stored_chunks_or_of_none():
    figures = {figure.prompt: figure for figure in MatchBench(chunks=50, tokens=3000).measure(repeats=5)}
    stored, edges, none = figures.values()
    assert list(figures) == ["chunks as stored", "both edges of each differ", "no stored chunk"]
    assert stored.found > 0.7
    assert 0.7 < edges.found < 1
    assert stored.chunks > 5
    assert (none.chunks, none.found) == (0, 0)
    assert all(0 < figure.median_ms <= figure.p95_ms for figure in figures.values())


def test_the_command_prints_a_table_and_a_line_about_the_machine():
    result = CliRunner().invoke(app, ["match", "--chunks", "20", "--tokens", "1000", "--repeats", "3"])
    assert result.exit_code == 0
    assert "20 stored, prompts of 1,000 tokens" in result.output
    assert "Adding a chunk" in result.output
    assert "cores, load" in result.output
