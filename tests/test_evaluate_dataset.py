"""Data sets of several forms, and errors that say where to look."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import DatasetError
from blendrag.evaluate import FollowUp, Question, load_questions, shuffled

ROOT = Path(__file__).parent.parent
DOCUMENT = {"title": "Eller", "text": "The Eller rises on Grey Moor."}


def written(tmp_path: Path, content: Any, name: str = "data.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def test_a_dump_of_musique(tmp_path: Path) -> None:
    entry = {"ctxs": [DOCUMENT, {"title": "", "text": "Salmon."}], "question": "Where?", "answers": ["Grey Moor"]}
    [question] = load_questions(written(tmp_path, [entry]))
    chunks = ("Eller\n\nThe Eller rises on Grey Moor.\n\n", "\n\nSalmon.\n\n")
    assert question == Question("Where?", chunks, ("Grey Moor",), None, 1)


def test_a_log_of_a_rag_application(tmp_path: Path) -> None:
    lines = [{"question": "Where?", "ctxs": ["The Eller rises."], "answer": "Grey Moor", "user": 7},
             {"question": "Why?", "ctxs": [{"text": "Nobody knows.", "title": None}]},
             {"question": "Who?", "ctxs": ["She."], "answers": None, "answer": ["Ruth", "Judith"],
              "instruction": "Be brief."}]
    path = written(tmp_path, "\n\n".join(json.dumps(line) for line in lines), "log.jsonl")
    where, why, who = load_questions(path)
    assert (where.chunks, where.answers, where.line) == (("The Eller rises.\n\n",), ("Grey Moor",), 1)
    assert (why.chunks, why.answers, why.line) == (("Nobody knows.\n\n",), (), 3)
    assert (who.answers, who.instruction) == (("Ruth", "Judith"), "Be brief.")
    assert load_questions(path, limit=1) == [where]


def test_a_conversation(tmp_path: Path) -> None:
    asked = ["And when?", {"question": "How long?", "answer": "71 km", "instruction": "Be brief."}]
    entry = {"ctxs": [DOCUMENT], "question": "Where?", "follow_ups": asked}
    alone = {"ctxs": [DOCUMENT], "question": "Where?", "follow_ups": None}
    first, second = load_questions(written(tmp_path, [entry, alone]))
    assert first.follow_ups == (FollowUp("And when?"), FollowUp("How long?", ("71 km",), "Be brief."))
    assert second.follow_ups == ()


def test_lines_of_an_indented_list_are_counted(tmp_path: Path) -> None:
    entries = [{"question": "A?", "ctxs": ["x"]}, {"question": "B?", "ctxs": ["y"]}]
    assert [q.line for q in load_questions(written(tmp_path, json.dumps(entries, indent=1)))] == [2, 8]


@pytest.mark.parametrize(("entry", "said"), [
    ("text", "line 1: an entry is an object, not a text"),
    ({"ctxs": ["x"]}, "line 1: question is missing"),
    ({"question": "A?"}, "line 1: ctxs is missing"),
    ({"question": 3, "ctxs": ["x"]}, "line 1: question is a number: give a text"),
    ({"question": " ", "ctxs": ["x"]}, "line 1: question is empty: give a text"),
    ({"question": "A \ud83d?", "ctxs": ["x"]}, "line 1: question holds half a character"),
    ({"question": "A?", "ctxs": [{"title": "\ud83d", "text": "x"}]}, r"ctxs\[0\].title holds half a character"),
    ({"question": "A?", "ctxs": []}, "line 1: ctxs is empty: give a list"),
    ({"question": "A?", "ctxs": {"text": "x"}}, "line 1: ctxs is an object: give a list"),
    ({"question": "A?", "ctxs": ["x", 5]}, r"line 1: ctxs\[1\] is a number"),
    ({"question": "A?", "ctxs": [{"title": "x"}]}, r"line 1: ctxs\[0\].text is missing"),
    ({"question": "A?", "ctxs": [{"title": 1, "text": "x"}]}, r"line 1: ctxs\[0\].title is a number"),
    ({"question": "A?", "ctxs": ["x"], "answers": ["y", 1847]}, r"line 1: answers\[1\] is a number"),
    ({"question": "A?", "ctxs": ["x"], "answer": True}, "line 1: answer is a truth value"),
    ({"question": "A?", "ctxs": ["x"], "instruction": []}, "line 1: instruction is empty"),
    ({"question": "A?", "ctxs": ["x"], "follow_ups": "B?"}, "line 1: follow_ups is a text: give a list"),
    ({"question": "A?", "ctxs": ["x"], "follow_ups": ["B?", 7]}, r"line 1: follow_ups\[1\] is a number: give a text"),
    ({"question": "A?", "ctxs": ["x"], "follow_ups": [{"answer": "y"}]}, r"follow_ups\[0\].question is missing"),
    ({"question": "A?", "ctxs": ["x"], "follow_ups": [{"question": "B?", "answers": [3]}]},
     r"line 1: follow_ups\[0\]: answers\[0\] is a number"),
])
def test_an_entry_that_is_wrong_is_named(tmp_path: Path, entry: Any, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        load_questions(written(tmp_path, [entry]))
    with pytest.raises(DatasetError, match=said.replace("line 1", "line 2")):
        load_questions(written(tmp_path, "\n" + json.dumps(entry)))


def test_files_that_are_no_data_sets(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"cannot be read .* check the path"):
        load_questions(tmp_path / "none.json")
    with pytest.raises(DatasetError, match="holds no questions"):
        load_questions(written(tmp_path, "[]"))
    with pytest.raises(DatasetError, match="holds no questions"):
        load_questions(written(tmp_path, ""))
    with pytest.raises(DatasetError, match=r"is not JSON .*line 2"):
        load_questions(written(tmp_path, '[{"question": "A?",\n "ctxs": oops}]'))
    with pytest.raises(DatasetError, match="line 2: this is not JSON"):
        load_questions(written(tmp_path, '{"question": "A?", "ctxs": ["x"]}\n{'))
    (tmp_path / "latin").write_bytes(b'["\xe9"]')
    with pytest.raises(DatasetError, match="not UTF-8"):
        load_questions(tmp_path / "latin")


@pytest.mark.parametrize("name", ["multihop", "lookup", "summaries", "conversations"])
def test_the_data_sets_that_we_ship(name: str) -> None:
    questions = load_questions(ROOT / "examples/data" / f"{name}.json")
    assert len(questions) >= 6
    for question in questions:
        assert question.answers
        assert len(set(question.chunks)) == len(question.chunks) >= 4
        assert len(question.follow_ups) == (2 if name == "conversations" else 0)
        assert all(follow_up.answers for follow_up in question.follow_ups)


def test_the_data_sets_are_what_their_script_makes(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "scripts/make_questions.py"), {}, "make_questions")
    made["main"].__globals__["FOLDER"] = tmp_path
    made["main"]()
    for path in (ROOT / "examples/data").glob("*.json"):
        assert (tmp_path / path.name).read_text("utf-8") == path.read_text("utf-8")


@pytest.mark.parametrize("start", ["", "\n", "{\"question\": "])
def test_what_is_nested_too_deeply_is_no_json_of_ours(tmp_path: Path, start: str) -> None:
    with pytest.raises(DatasetError, match="is not JSON"):
        load_questions(written(tmp_path, start + "[" * 100_000))


def test_shuffled_documents_are_the_same_ones_in_an_order_of_the_seeds() -> None:
    questions = [Question(f"Question {n}?", tuple(f"{n} {letter}" for letter in "abcdefgh"), line=n) for n in range(4)]
    again = shuffled(questions, 1)
    assert again == shuffled(questions, 1) != shuffled(questions, 2)
    assert again[:2] == shuffled(questions[:2], 1)
    for before, after in zip(questions, again, strict=True):
        assert before.chunks != after.chunks
        assert sorted(after.chunks) == list(before.chunks)
        assert (after.text, after.line) == (before.text, before.line)
