"""The demo and the command line, on real documents and a real engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blendrag import __version__
from blendrag.cli import app
from blendrag.cli.index import run_index
from blendrag.config import BlendConfig
from blendrag.demo import DemoSettings, run_demo
from blendrag.demo.corpus import ask_about
from blendrag.demo.prompts import build_prompt, scrambled
from blendrag.documents import DocumentChunk
from blendrag.documents.retrieve import Retriever
from blendrag.prompt import Chunk

KEYS = ["question", "answer_full", "answer_blend", "ttft_full_s", "ttft_cold_s", "ttft_warm_s", "prompt_tokens", "rows",
        "kl_first_token", "chunks"]
ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": 2**27}  # unasked, vLLM fills half a machine with zeros
ANIMALS = {"heron": "stands still in shallow water and waits for fish", "mole": "digs tunnels below the meadow",
           "swift": "sleeps on the wing and lands only to nest", "otter": "floats on its back and cracks shells"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four documents of some 80 words each."""
    docs = tmp_path / "my documents"
    docs.mkdir()
    for name, habit in ANIMALS.items():
        habits = "\n\n".join(f"In year {year} of the survey, every {name} that was seen {habit}." for year in range(6))
        (docs / f"{name}.md").write_text(f"# The {name}\n\n{habits}\n")
    return docs


def chunk(text: str, source: str = "a.md", heading: str = "") -> DocumentChunk:
    return DocumentChunk(text, source, heading, len(text.split()))


def test_the_demo_from_end_to_end_and_again(folder: Path, engine_pool: Any, shallow: Path, tmp_path: Path) -> None:
    engine_pool.close()
    settings = DemoSettings(docs=folder, model=str(shallow), store=tmp_path / "store", json_file=tmp_path / "out.json",
                            chunk_tokens=64, answer_tokens=8,
                            engine_args=ENGINE | {"dtype": "float32", "max_model_len": 512})
    shown = StringIO()
    run_demo(settings, Console(file=shown, width=120))
    results = json.loads((tmp_path / "out.json").read_text())
    assert [list(result) for result in results] == [KEYS] * 3
    assert [result["question"] for result in results] == [f"What does {n}.md say about “The {n}”?" for n in
                                                          ("heron", "otter", "swift")]
    for result in results:
        assert all(list(c) == ["source", "tokens", "reused"] for c in result["chunks"])
        assert all(c["reused"] for c in result["chunks"])
        assert result["chunks"][0]["source"] in result["question"]
        assert sum(c["tokens"] for c in result["chunks"]) < result["prompt_tokens"] < 512
        assert min(result["ttft_full_s"], result["ttft_cold_s"], result["ttft_warm_s"]) > 0
        assert 0 < result["rows"] < 0.6
        assert 0 <= result["kl_first_token"] < math.inf
        assert result["answer_full"]
        assert result["answer_blend"]
    assert "0 were stored already" in shown.getvalue()
    assert all(word in shown.getvalue() for word in ("Question 3 of 3", "speed-up", "heron.md", "reused"))

    again = StringIO()
    once_more = replace(settings, questions=["Which animal waits for fish?"], top_k=2)
    run_demo(once_more, Console(file=again, width=120))
    [result] = json.loads((tmp_path / "out.json").read_text())
    assert result["question"] == "Which animal waits for fish?"
    assert [c["source"] for c in result["chunks"]] == ["heron.md", "heron.md"]
    assert all(c["reused"] for c in result["chunks"])
    assert "0 chunks computed" in again.getvalue()


def test_the_index_is_kept_and_finds(tmp_path: Path) -> None:
    chunks = [chunk(f"The {name} {habit}.", f"{name}.md") for name, habit in ANIMALS.items()]
    first = Retriever(chunks, tmp_path)
    again = Retriever(chunks, tmp_path)
    other = Retriever(chunks[:2], tmp_path)
    assert (first.stored, again.stored, other.stored) == (False, True, False)
    for retriever in (first, again):
        assert retriever.search("Who catches fish in shallow water?")[0].source == "heron.md"
        assert len(retriever.search("anything")) == 4


def test_prompts_keep_the_chunks(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = build_prompt(tokenizer, "Why?", [Chunk("One.\n"), Chunk("Two <|im_end|>")])
    assert prompt.chunks == ["One.\n", "Two <|im_end|>"]
    assert prompt.prefix == build_prompt(tokenizer, "What?", [Chunk("Other")]).prefix
    assert prompt.text.endswith("Question: Why?<|im_end|>\n<|im_start|>assistant\n")
    assert not prompt.add_special_tokens
    tokenizer.chat_template = None
    assert build_prompt(tokenizer, "Why?", [Chunk("One.")]).text.endswith("One.\n\nQuestion: Why?\nAnswer:")


def test_scrambling_leaves_no_part_of_a_chunk_where_it_was(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    chunks = [Chunk("One is here.\n\nTwo, there."), Chunk("灯台は一八四七年に建てられた。" * 20)]
    prompt = build_prompt(AutoTokenizer.from_pretrained(smollm2), "Why?", chunks)
    other = scrambled(prompt)
    assert other.chunks == ["there. Two, here.\n\nis One", chunks[1].text[::-1]]
    assert [part for part in other.parts if isinstance(part, str)] == [
        part for part in prompt.parts if isinstance(part, str)]
    assert other.add_special_tokens == prompt.add_special_tokens


def test_questions_come_from_headings_else_from_documents() -> None:
    named = [chunk("x", f"{n}.md", f"Part {n}") for n in range(5)]
    assert ask_about(named) == [f"What does {n}.md say about “Part {n}”?" for n in (0, 2, 4)]
    assert ask_about([chunk("x", "a.txt"), chunk("y", "b.txt")])[:2] == ["What is a.txt about?", "What is b.txt about?"]
    assert len(ask_about([chunk("x", "a.txt")])) == 3


@pytest.mark.parametrize(("arguments", "says"), [
    (["demo", "/no/such/folder"], "/no/such/folder does not exist: name a folder of .md, .txt, .html or .pdf files"),
    (["demo", "--json", "/no/such/folder/out.json"],
     "/no/such/folder/out.json cannot be written (No such file or directory): name another file"),
    (["index", "/no/such/folder", "--model", "smollm2", "--store", "/tmp/none"], "does not exist: name a folder"),
    (["models", "fetch", "gpt-9"], "there is no demo model 'gpt-9': choose from smollm2, minilm"),
])
def test_errors_are_one_sentence_on_stderr(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_index_stores_every_chunk_once(folder: Path, engine_pool: Any, tmp_path: Path) -> None:
    engine_pool.close()
    shown = StringIO()
    for _ in range(2):
        run_index(folder, "smollm2", BlendConfig(store_path=tmp_path / "store"), 64, Console(file=shown),
                  ENGINE | {"max_model_len": 256})
    first, again = [line for line in shown.getvalue().splitlines() if "documents" in line]
    assert "chunks of 4 documents" in first
    assert ": 12 computed, 0 stored already, 0 too short to store" in first
    assert ": 0 computed, 12 stored already, 0 too short to store" in again


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"blendrag {__version__}\n"
