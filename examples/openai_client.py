"""OpenAI's own client and `blendrag serve`: a question about the same documents twice, in another order.

    .venv/bin/python examples/openai_client.py [BASE_URL]

BASE_URL is that of a running `blendrag serve`, http://localhost:8000/v1 for instance, and OPENAI_API_KEY its key if it
has one.  Without BASE_URL a server with SmolLM2 is started for the time being.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import APIConnectionError, OpenAI
from openai.types.chat import ChatCompletion

PAGE = Path(__file__).parents[1] / "docs" / "design.md"
QUESTION = "Why is the same chunk not found by a prefix cache when it stands behind another one?"


@contextmanager
def serving() -> Iterator[str]:
    """Starts `blendrag serve smollm2`, yields its base URL, and ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen([sys.executable, "-m", "blendrag", "serve", "smollm2", "--port", port,
                               "--max-model-len", "4096"], env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
    try:
        yield f"http://localhost:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def model_of(client: OpenAI) -> str:
    """The name of the model, once the server answers."""
    for _ in range(300):
        try:
            return client.models.list().data[0].id
        except APIConnectionError:
            time.sleep(1)
    raise SystemExit("the server does not answer: look at what it printed")


def send(client: OpenAI, model: str, documents: list[str], max_tokens: int) -> tuple[ChatCompletion, dict[str, Any]]:
    """Sends the documents' texts beside the question; the answer, and what it says of the documents."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=max_tokens,
        extra_body={"documents": documents})
    return answer, (answer.model_extra or {})["kv_transfer_params"]["blend"]


def wait_until_stored(client: OpenAI, model: str, documents: list[str]) -> None:
    """A server stores new documents when no request waits for it: within seconds here."""
    while any(chunk["reason"] == "not stored" for chunk in send(client, model, documents, 1)[1]["chunks"]):
        time.sleep(0.1)


def ask(client: OpenAI, model: str, documents: list[str]) -> None:
    """Prints an answer, and what it says of the documents."""
    answer, blend = send(client, model, documents, 30)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    print(answer.choices[0].message.content)
    print(f"{usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens} of them not computed, "
          f"{blend['chunks_reused']} of {blend['chunks_found']} documents reused\n")


def main(base_url: str) -> None:
    """Asks, and asks again."""
    client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = model_of(client)
    sections = [section.strip() for section in PAGE.read_text("utf-8").split("\n## ")]
    documents = [section for section in sections if 300 < len(section) < 1500][:3]
    ask(client, model, documents)
    wait_until_stored(client, model, documents)
    ask(client, model, documents[::-1])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with serving() as url:
            main(url)
