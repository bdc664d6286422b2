"""What `bench serve` and `bench turns` print and write."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blendrag.bench.cli import app
from blendrag.bench.load.figures import Figures, Ledger, Quantiles
from blendrag.bench.load.origin import Origin
from blendrag.bench.load.outputs import Outputs
from blendrag.bench.load.page import load_page, turns_page
from blendrag.bench.load.report import load_tables, show, turn_tables
from blendrag.bench.load.turns import Style, TurnFigure
from blendrag.errors import BlendError, ConfigError

ORIGIN = Origin("python -m blendrag.bench serve --goodput 'ttft:<500'", "A machine", 0.5, {"vllm": "0.26"},
                "2026-12-01")
SLOW, FAST = Quantiles(400, 800, 1000, 2000), Quantiles(200, 300, 400, 500)


def figures(arm: str, rate: float, ttft: Quantiles, good: float, *, beside: bool = True) -> Figures:
    reused = 700 if arm == "blended" else 0
    return Figures(arm, f"{rate:g}/s", rate, 40, 0, "", rate, good, ttft, FAST, SLOW if beside else None,
                   FAST if beside else None, Ledger(1000, 900 - reused, 100, reused), 0.25, [100, 110], 1.1)


LOADS = [figures("plain", 1, SLOW, 0.5), figures("blended", 1, FAST, 1), figures("plain", 2, SLOW, 0),
         figures("blended", 2, FAST, 2)]
TURNS = [TurnFigure(style, turn, 500, {"plain": 300, "blended": 100}, {"plain": 1, "blended": 0.2})
         for style in (Style.SAME, Style.ACCUMULATED) for turn in (1, 2, None)]


def printed(grids: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(console, grids)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_compare_the_arms_load_by_load() -> None:
    speed, beside, ledger = load_tables(LOADS)
    assert [row[1] for row in speed.rows] == ["plain", "blended", "gain"] * 2
    assert speed.rows[2][3:8] == ("1.00", "2.00", "2.00", "2.67", "2.50")
    assert speed.rows[5][4] == ""  # no answer of plain's was good
    assert beside.rows[0][2:6] == ("400", "800", "1000", "2000")
    assert ledger.rows[1] == ("1/s", "blended", "1,000", "200", "100", "700", "0.250", "1.10")
    assert "Where the prompt tokens came from" in printed(load_tables(LOADS))


def test_a_failure_is_named_below_the_table() -> None:
    lost = replace(LOADS[1], failed=2, failure="the server is gone")
    speed = load_tables([LOADS[0], lost])[0]
    assert speed.rows[1][2] == "2"
    assert speed.notes.endswith("the first failure: the server is gone")


def test_a_load_with_nothing_beside_it_has_no_table_for_that() -> None:
    alone = [figures(arm, 1, FAST, 1, beside=False) for arm in ("plain", "blended")]
    assert [grid.title for grid in load_tables(alone)] == ["Speed", "Where the prompt tokens came from"]


def test_turns_have_a_table_for_each_style_with_a_line_for_all() -> None:
    same, accumulated = turn_tables(TURNS)
    assert same.title == "First token of each turn, documents same"
    assert [row[0] for row in same.rows] == ["1", "2", "all"]
    assert accumulated.rows[0][2:5] == ("300", "100", "3.00")


def test_the_page_draws_curves_of_both_arms_and_names_its_origin() -> None:
    drawn = load_page(LOADS, "smollm2 <rag>", ORIGIN)
    assert "smollm2 &lt;rag&gt;" in drawn
    assert "ttft:&lt;500" in drawn
    assert "prefers-color-scheme: dark" in drawn
    assert "<script" not in drawn
    assert "http" not in drawn
    charts = [ElementTree.fromstring(f"<svg{rest.split('</svg>')[0]}</svg>") for rest in drawn.split("<svg")[1:]]
    curves = [chart for chart in charts if chart.findall("polyline")]
    assert len(curves) == 10  # eight over the rate, and one over the run for each rate
    assert all(len(chart.findall("polyline")) == 2 for chart in curves)


def test_the_page_of_turns_has_a_chart_for_each_style() -> None:
    assert turns_page(TURNS, "smollm2", ORIGIN).count("<figure>") == 2


def test_files_hold_the_figures_with_command_machine_and_versions(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path / "f.json", tmp_path / "f.html", "smollm2, rag")
    outputs.publish(LOADS, load_tables(LOADS), load_page)
    content = json.loads((tmp_path / "f.json").read_text())
    assert content["title"] == "smollm2, rag"
    assert {"command", "machine", "load", "versions", "ended"} == set(content["origin"])
    assert content["figures"][1]["ledger"] == {"prompt": 1000, "computed": 200, "cached": 100, "reused": 700}
    assert (tmp_path / "f.html").read_text().startswith("<!doctype html>")


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(BlendError, match="cannot be written"):
        Outputs(tmp_path / "missing" / "f.json", None, "")
    with pytest.raises(ConfigError, match="both name"):
        Outputs(tmp_path / "f", tmp_path / "f", "")


@pytest.mark.parametrize(("options", "message"), [
    (["serve", "--http", "http://localhost:1", "--server"], "measures a server that runs already"),
    (["turns", "--http", "http://localhost:1", "--enforce-eager"], "engine options (--enforce-eager)"),
    (["serve", "--plain-http", "http://localhost:1"], "add --http URL or --server"),
    (["serve", "--goodput", "fast"], "write ttft:MS or tpot:MS"),
    (["serve", "--documents", "2"], "make the pool larger"),
    (["turns", "--documents", "2"], "make it larger, or turns fewer"),
    (["serve", "--http", "http://127.0.0.1:1", "--requests", "1"], "does not answer"),
])
def test_the_commands_refuse_what_makes_no_sense(options: list[str], message: str, smollm2: Path) -> None:
    result = CliRunner().invoke(app, [*options, "--model", str(smollm2)])
    assert isinstance(result.exception, BlendError)
    assert message in str(result.exception)
