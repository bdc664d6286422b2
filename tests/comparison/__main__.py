"""Finds out what the classes can do, and writes docs/integrations.md: `python -m tests.comparison`.

`python -m tests.comparison NAME ...` does so for some columns, `--write` writes the page from the recorded results.
The packages of rivals.txt must be importable.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.comparison import page
from tests.comparison.features import FEATURES, run

PATIENCE_S = 180
HANGS = f"no answer within {PATIENCE_S} s"
MIXED = ("gathered", "threads", "close")
"""Probes after which an engine may be good for nothing: they come last."""


def main() -> None:
    """Runs each column in a process of its own, which has one engine."""
    parser = argparse.ArgumentParser(prog="python -m tests.comparison", description=__doc__)
    parser.add_argument("columns", nargs="*", metavar="NAME", help=f"of {', '.join(page.COLUMNS)}; all")
    parser.add_argument("--write", action="store_true", help="run nothing")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure(arguments.columns[0], arguments.here)
        os._exit(0)  # a probe may hang still
    results = page.results() if page.RESULTS.exists() else {"cells": {}}
    for name in [] if arguments.write else arguments.columns or page.COLUMNS:
        results["cells"][name] = column(name)
        results |= {"date": datetime.now(UTC).date().isoformat(), "versions": page.versions()}
        page.RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    page.PAGE.write_text(page.page(results))


def column(name: str) -> dict[str, Any]:
    """The cells of a column; a probe after which its process is of no use is followed by a new process."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder, "cells.json")
        here.write_text("{}")
        while waiting := [key for key in _order() if key not in (cells := json.loads(here.read_text()))]:
            command = [sys.executable, "-m", "tests.comparison", name, "--here", str(here)]
            done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            if done.returncode == 0:
                continue
            found = json.loads(here.read_text())
            if not found:
                sys.exit(done.stderr)
            at = next(key for key in waiting if key not in found)
            found[at] = {"value": False, "why": page.shortened(f"the process dies: {_last(done.stderr)}")}
            here.write_text(json.dumps(found))
        return {key: cells[key] for key in FEATURES}


def _last(said: str) -> str:
    """What a process said when it died."""
    lines = reversed(re.split(r"[\r\n]|\x1b\[A", said))
    return next((line for line in lines if "failed" in line or "Error" in line), "")


def _order() -> list[str]:
    return sorted(FEATURES, key=lambda key: MIXED.index(key) + 1 if key in MIXED else 0)


def measure(name: str, here: Path) -> None:
    """Adds to a file the cells of a column that it does not hold; ends early where a probe hangs."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HAYSTACK_TELEMETRY_ENABLED": "False",
                   "VLLM_NO_USAGE_STATS": "1"}
    from blendrag.models import fetch
    from tests.comparison.columns import with_bos

    cells = json.loads(here.read_text())
    model = with_bos(fetch("smollm2"), Path(tempfile.mkdtemp(), "smollm2"))
    with _subject(name, model) as subject:
        for key in _order():
            if key in cells:
                continue
            cells[key] = _cell(lambda key=key: run(FEATURES[key], subject))
            here.write_text(json.dumps(cells))
            if cells[key].get("why") == HANGS:
                return


def _cell(probe: Any) -> dict[str, Any]:
    """What a probe found: `{"value": True, False or None}`, and `why` where the class raised an error."""
    cell: dict[str, Any] = {"value": False, "why": HANGS}

    def find() -> None:
        try:
            found = {"value": probe()}
        except Exception as error:
            found = {"value": False, "why": page.shortened(f"{type(error).__name__}: {error}")}
        cell.pop("why")
        cell.update(found)

    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return dict(cell)


@contextmanager
def _subject(name: str, model: Path) -> Iterator[Any]:
    from tests.comparison import columns
    from tests.engine.serving import ENGINE, Server, blendrag_command, vllm_command

    options = (str(model), *ENGINE, "--max-model-len", "2048", "--trust-request-chat-template",
               "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    if name in columns.OURS:
        yield columns.ours(name, model=str(model), engine_args=columns.ENGINE)
    elif name == columns.SERVED:
        with Server([*blendrag_command(), "serve", *options]) as server:
            yield columns.served(server, model)
    elif name == "VLLMChatGenerator":
        with Server([*vllm_command(), "serve", *options, "--enable-prompt-tokens-details"]) as server:
            yield columns.vllm_haystack(server, model)
    else:
        make = {"VLLM": columns.community_vllm, "Vllm": columns.llama_index_vllm,
                "ChatHuggingFace": columns.chat_hugging_face}[name]
        yield make(model)


if __name__ == "__main__":
    main()
