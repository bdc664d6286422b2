"""Calibration by a real engine, and engines that find what it left."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from blendrag import BlendConfig, BlendEngine, BlendPrompt, Chunk, SamplingParams
from blendrag.calibrate import Target, calibrate
from blendrag.calibrate.candidates import CHEAPEST, FAMILIES
from blendrag.calibrate.generate import generate_questions
from blendrag.calibrate.sources import Given
from blendrag.cli import calibrate as command
from blendrag.documents import Source, split
from blendrag.evaluate import Question
from blendrag.policies import Exact, Query
from blendrag.profile import Profile, load_profile
from tests.engine.texts import PASSAGES, QUESTION

QUESTIONS = [Question(f"What is said of number {number} here?",
                      tuple(f"{PASSAGES[(number * step) % len(PASSAGES)]}\n\n" for step in (1, 2)), line=number)
             for number in range(1, 11)]
PROMPT = BlendPrompt("Answer from these.\n\n", *map(Chunk, PASSAGES[:3]), QUESTION)


def test_a_search_over_real_answers(smollm2_engine: BlendEngine) -> None:
    stages: dict[str, int] = {}
    found = calibrate(smollm2_engine, QUESTIONS, Target(max_kl=3.0), families=FAMILIES[:1], ratios=(0.5,),
                      on_progress=lambda stage, done, total: stages.update({stage: done}))
    names = {p.setting.name: p for p in found.tuning}
    assert set(names) == {"none", "first", "first, moved", "query"}
    assert found.control is not None
    assert found.control.kl < 1e-4
    assert names["none"].rows < names["first"].rows < max(p.rows for p in found.tuning)
    least, most = (p for p in found.tuning if p.setting.name == "query")
    assert (least.setting.ratio, most.setting.ratio) == (0.15, 0.5)
    assert most.kl < names["none"].kl
    assert {p.n for p in found.check} == {5}
    assert found.chosen is not None
    assert stages["plain answers"] == 10
    assert stages["comparing policies"] == stages["ratios of query"] == 5


def test_questions_about_documents_are_written_by_the_model(engine: BlendEngine) -> None:
    text = "\n\n".join(f"# Passage {number}\n\n{text}" for number, text in enumerate(PASSAGES))
    chunks = split(Source("passages.md", text), lambda text: len(engine.tokens.chunk_ids(text)), 128)

    def search(question: str) -> list[Any]:
        words = set(question.lower().split())
        return sorted(chunks, key=lambda chunk: -len(words & set(chunk.text.lower().split())))

    every = generate_questions(engine, chunks, search, 100, top_k=2)
    assert 3 < len(every) == len({(question.text, question.chunks) for question in every}) <= len(chunks)
    found = generate_questions(engine, chunks, search, 3, top_k=2)
    assert found == generate_questions(engine, chunks, search, 3, top_k=2)
    assert [question.line for question in found] == [1, 2, 3]
    for question in found:
        assert question.text.endswith("?")
        assert len(question.chunks) == 2
        assert all(chunk.rstrip() in text for chunk in question.chunks)


def test_engines_use_what_the_command_left_in_their_store(engine_pool: Any, shallow: Path, tmp_path: Path,
                                                          monkeypatch: Any) -> None:
    """The command itself, its search made short; then the same engine again, with what it found and without any."""
    engine_pool.close()
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "kv_cache_memory_bytes": 2**28}
    monkeypatch.setattr("blendrag.calibrate.search.CHEAPEST", CHEAPEST[:1])
    monkeypatch.setattr("blendrag.calibrate.calibrate", lambda *given, **options: calibrate(
        *given, families=FAMILIES[2:3], ratios=(), **options))
    data, target = tmp_path / "data.json", Target(max_kl=5)
    data.write_text(json.dumps([{"question": q.text, "ctxs": list(q.chunks)} for q in QUESTIONS]))
    console = Console(file=StringIO(), width=200)
    found = command.run_calibrate(str(shallow), tmp_path, Given(data, 10, target), target,
                                  BlendConfig(profile=False), console, arguments, tmp_path / "profile.json")
    assert found.chosen is not None
    [path] = (tmp_path / "profiles").iterdir()
    profile = load_profile(tmp_path, path.stem)
    assert profile is not None
    assert (profile.model, profile.questions, profile.target) == (str(shallow), 10, {"max_kl": 5})
    assert profile.policy == found.chosen.setting.policy
    assert profile.curve == [p.to_dict() | {"policy": profile.curve[n]["policy"]} for n, p in enumerate(found.tuning)]
    assert "But not with these settings" in console.file.getvalue(), "where profile=False"
    assert (tmp_path / "profile.json").read_text() == path.read_text()
    Profile(**(vars(profile) | {"policy": None})).save(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2)
    with BlendEngine(str(shallow), config=BlendConfig(store_path=tmp_path), **arguments) as engine:
        assert (engine.fingerprint, engine.policy) == (path.stem, Exact())
        engine.encode(PASSAGES[:3])
        [refused] = engine.generate(PROMPT, params)
        assert (refused.stats.policy, refused.stats.calibrated, refused.stats.chunks_reused) == ("exact", True, 0)
        engine.reset_prefix_cache()  # what is cached and exact would be preferred
        [asked] = engine.generate(PROMPT, params, policy=Query(ratio=0.3))
        assert (asked.stats.policy, asked.stats.calibrated, asked.stats.chunks_reused) == ("query", False, 3)
