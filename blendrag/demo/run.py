"""The demo from end to end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from blendrag.config import BlendConfig
from blendrag.demo.corpus import OWN_QUESTIONS, ask_about, own_documentation
from blendrag.demo.measure import Measurement, measure, warm_up
from blendrag.demo.prompts import build_prompt
from blendrag.demo.report import show_question, show_summary
from blendrag.documents import DocumentChunk, read_folder, split
from blendrag.documents.retrieve import Retriever
from blendrag.engine import BlendEngine
from blendrag.files import check_writable, write
from blendrag.models import engine_arguments, fetch, resolve
from blendrag.terminal import document_warnings, progress_bar

PROMPT_TOKENS = 2048
"""Chunks are retrieved until a prompt has about as many tokens."""


@dataclass(frozen=True)
class DemoSettings:
    """What `blendrag demo` can be told; see its help."""

    docs: Path | None = None
    model: str = "smollm2"
    questions: Sequence[str] = ()
    chunk_tokens: int = 256
    top_k: int | None = None
    answer_tokens: int = 64
    store: Path = Path("~/.cache/blendrag/demo-store")
    json_file: Path | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)


def run_demo(settings: DemoSettings, console: Console) -> list[Measurement]:
    """Indexes the documents, asks the questions, shows the results and writes them to `settings.json_file`.

    Raises:
        BlendError: nothing to read, a model that cannot be loaded, a file that cannot be written.
    """
    if settings.json_file:
        check_writable(settings.json_file)
    with document_warnings(console):
        sources = own_documentation() if settings.docs is None else read_folder(settings.docs)
    store = settings.store.expanduser()
    with console.status("fetching the models (once)"):
        model = resolve(settings.model)
        fetch("minilm")
    arguments = engine_arguments(settings.model) | {"max_logprobs": -1} | settings.engine_args
    with BlendEngine(model, config=BlendConfig(store_path=store / "kv"), **arguments) as engine:
        started = time.monotonic()
        with console.status("starting vLLM (a minute or more where it compiles the model)"):
            tokens = engine.tokens
        console.print(Text(f"vLLM runs {settings.model} after {time.monotonic() - started:.0f} s"))
        chunks = [chunk for source in sources
                  for chunk in split(source, lambda text: len(tokens.chunk_ids(text)), settings.chunk_tokens)]
        console.print(Text(f"{len(sources)} documents, {len(chunks)} chunks, {sum(c.tokens for c in chunks):,} tokens"))
        with console.status("embedding the chunks for retrieval"):
            retriever = Retriever(chunks, store / "index")
        _encode(engine, chunks, console)
        results = _ask_all(engine, retriever, _questions(settings, chunks), settings, console)
    show_summary(console, results)
    if settings.json_file:
        found = json.dumps([result.to_dict() for result in results], indent=2, ensure_ascii=False)
        write(settings.json_file, found + "\n")
    return results


def _questions(settings: DemoSettings, chunks: Sequence[DocumentChunk]) -> list[str]:
    if settings.questions:
        return list(settings.questions)
    return list(OWN_QUESTIONS) if settings.docs is None else ask_about(chunks)


def _encode(engine: BlendEngine, chunks: Sequence[DocumentChunk], console: Console) -> None:
    """Stores the KV of each chunk, encoded behind what precedes chunks in every prompt of the demo."""
    prefix = build_prompt(engine.tokenizer, "", chunks[:1]).prefix
    started = time.monotonic()
    with progress_bar(console, "computing the chunks' KV") as on_progress:
        encoded = engine.encode(chunks, prefix=prefix, on_progress=on_progress)
    new = sum(chunk.new for chunk in encoded)
    console.print(Text(f"{new} chunks computed in {time.monotonic() - started:.1f} s, {len(encoded) - new} were stored "
                       f"already; {engine.store.stats.disk_bytes / 2**20:,.0f} MiB in {engine.store.path}"),
                  soft_wrap=True)


def _ask_all(engine: BlendEngine, retriever: Retriever, questions: Sequence[str], settings: DemoSettings,
             console: Console) -> list[Measurement]:
    results = []
    for number, question in enumerate(questions, 1):
        with console.status(f"question {number} of {len(questions)}: every way of answering, three times"):
            chunks = _pick(engine, question, retriever.search(question), settings)
            if number == 1:
                warm_up(engine, question, chunks)
            results.append(measure(engine, question, chunks, settings.answer_tokens))
        show_question(console, number, len(questions), results[-1])
    return results


def _pick(engine: BlendEngine, question: str, ranked: Sequence[DocumentChunk],
          settings: DemoSettings) -> list[DocumentChunk]:
    """The best chunks: `settings.top_k` of them, or as many as make about `PROMPT_TOKENS` and fit the model."""
    if settings.top_k is not None:
        return list(ranked[: settings.top_k])
    room = engine.max_model_len - settings.answer_tokens
    most = 1
    while (most < len(ranked) and _length(engine, question, ranked[:most]) < PROMPT_TOKENS
           and _length(engine, question, ranked[: most + 1]) <= room):
        most += 1
    return list(ranked[:most])


def _length(engine: BlendEngine, question: str, chunks: Sequence[DocumentChunk]) -> int:
    return len(engine.tokens(build_prompt(engine.tokenizer, question, chunks)).ids)
