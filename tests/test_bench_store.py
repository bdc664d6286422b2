"""The benchmark of the disk tier measures what it says it does."""

from pathlib import Path

from typer.testing import CliRunner

from blendrag.bench.cli import app
from blendrag.bench.store import measure


def test_every_operation_is_measured_against_the_file_system(tmp_path: Path) -> None:
    figures = measure(tmp_path, megabytes=1, repeats=1, group=2)
    assert [figure.what for figure in figures] == ["put", "put of 2 at once", "get", "get, not in the page cache"]
    assert all(figure.seconds > 0 and figure.raw_s > 0 for figure in figures)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["store", "--megabytes", "1", "--repeats", "1", "--group", "2", "--path",
                                      str(tmp_path)])
    assert result.exit_code == 0
    assert "times raw" in result.output
