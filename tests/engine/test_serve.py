"""`blendrag serve` and `vllm serve`, used by stock clients: reuse without a change on the client's side."""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

from blendrag import BlendPrompt, Chunk, mark_chunks
from blendrag.bench.load.clients import send
from blendrag.bench.load.figures import Ledger
from blendrag.bench.load.http_client import HttpClient
from blendrag.errors import ConfigError
from blendrag.runtime.engine.connectors import CONNECTOR, WORKER
from tests.comparison import page
from tests.comparison.columns import served
from tests.comparison.features import FEATURES, run
from tests.comparison.subject import Subject
from tests.engine.families import FAMILIES, build
from tests.engine.serving import ENGINE, Server, blendrag_command, vllm_command
from tests.engine.texts import PASSAGES

RULES = "You answer in one sentence, from the passages alone."
QUESTION = "Who chairs the water committee of the town where the cheese is sold?"
TEMPLATE = "{% for document in documents %}{{ document.text }}\n{% endfor %}{{ messages[-1].content }}\n"


@pytest.fixture(scope="module")
def servers(engine_pool: Any, smollm2: Path) -> Iterator[tuple[Server, Server]]:
    """`blendrag serve`, and plain vLLM, which renders what clients send and has no engine."""
    engine_pool.close()  # one engine at a time on this machine
    both = ("--max-model-len", "2048", "--trust-request-chat-template",
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    doors = ("--enable-scale-out",)
    with tempfile.TemporaryDirectory() as temporary:
        ours = Server([*blendrag_command(), "serve", str(smollm2), *ENGINE, *both, *doors, "--api-key", "key"],
                      api_key="key", temporary=temporary)
        plain = Server([*vllm_command(), "launch", "render", str(smollm2), "--served-model-name", "served", *both])
        with ours, plain:
            yield ours, plain
        assert not list(Path(temporary).glob("blendrag-*")), "the server's chunks outlived it"


@pytest.fixture
def server(servers: tuple[Server, Server]) -> Server:
    return servers[0]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client


@pytest.fixture(scope="module")
def chat_openai(servers: tuple[Server, Server], smollm2: Path) -> Subject:
    """LangChain's client of the server, as docs/integrations.md compares it."""
    return served(servers[0], smollm2)


@pytest.fixture
def same(servers: tuple[Server, Server]) -> Callable[..., None]:
    """Asserts that the model receives of a chat what a plain vLLM would have sent it, token by token."""
    ours, plain = servers

    def compare(body: dict[str, Any], as_plain: dict[str, Any] | None = None) -> None:
        once = {"return_token_ids": True, "max_tokens": 1, "stream": False, "stream_options": None}
        got = ours.post("/v1/chat/completions", body | once).raise_for_status().json()["prompt_token_ids"]
        wanted = plain.post("/v1/chat/completions/render", (as_plain or body) | once).raise_for_status().json()
        assert got == wanted["token_ids"]

    return compare


def asking(*numbers: int) -> list[Any]:
    passages = "".join(f"{PASSAGES[number]}\n\n" for number in numbers)
    return [{"role": "system", "content": RULES}, {"role": "user", "content": passages + QUESTION}]


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="served", messages=messages, temperature=0, max_tokens=8,
                                          seed=1, **options)


def told(answer: Any) -> dict[str, Any]:
    """The statistics of an answer."""
    found: dict[str, Any] = answer.model_extra["kv_transfer_params"]["blend"]
    return found


def settle(send: Callable[[], Any]) -> None:
    """Sends a request again until the chunks that it brought are stored: that takes some steps of the engine."""
    for _ in range(500):
        if all(chunk["reason"] != "not stored" for chunk in told(send())["chunks"]):
            return
    raise AssertionError("the chunks are not stored")


def bring(client: openai.OpenAI, *numbers: int, **fields: Any) -> None:
    """Sends passages as documents, and returns once they are stored."""
    settle(lambda: ask(client, [{"role": "user", "content": "Say yes."}],
                       extra_body={"documents": [PASSAGES[number] for number in numbers]} | fields))


def unseen(number: int) -> str:
    """A text that no other test sends."""
    return " ".join(reversed(PASSAGES[number].split()))


# Any client, by matching.


def test_a_stock_client_reuses_what_earlier_requests_brought(client: openai.OpenAI) -> None:
    passages = mark_chunks(PASSAGES[:3])
    marked = ask(client, [{"role": "system", "content": RULES}, {"role": "user", "content": passages + QUESTION}])
    assert [chunk["reason"] for chunk in told(marked)["chunks"]] == ["not stored"] * 3
    assert marked.usage.prompt_tokens_details.cached_tokens == 0
    bring(client, 0, 1, 2)
    plain = ask(client, asking(2, 0, 1))
    assert (told(plain)["chunks_reused"], told(plain)["chunks_missed"]) == (3, 0)
    assert told(plain)["rows"] < 0.6
    assert plain.usage.prompt_tokens_details.cached_tokens == told(plain)["reused_tokens"] > 150
    assert plain.choices[0].message.content


def test_streaming(client: openai.OpenAI) -> None:
    for salt in ("whole", "stream"):
        bring(client, 3, 4, cache_salt=salt)
    whole = ask(client, asking(4, 3), extra_body={"cache_salt": "whole"})
    assert told(whole)["chunks_reused"] == 2
    pieces = list(ask(client, asking(4, 3), stream=True, stream_options={"include_usage": True},
                      extra_body={"cache_salt": "stream"}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens == told(whole)["reused_tokens"]


def test_the_benchmark_of_traffic_measures_a_server(server: Server) -> None:
    prefix = "Two passages.\n\n"
    prompt = BlendPrompt(prefix, Chunk(PASSAGES[5]), "\n\n", Chunk(PASSAGES[1]), "\n\nWhich of them is a program?")

    async def measure() -> None:
        blended, plain = (HttpClient(server.url, blend, api_key=server.api_key) for blend in (True, False))
        await blended.store(PASSAGES, prefix, anywhere=True, at_once=3)
        before = await blended.reused_tokens()
        replies = [await send(client, 0, prompt, 4) for client in (blended, plain)]
        after = await blended.reused_tokens()
        assert before is not None
        assert after is not None
        usages = [reply.usage for reply in replies if reply.usage]
        assert [usage.output for usage in usages] == [len(reply.moments) for reply in replies] == [4, 4]
        ledger, full = Ledger.of(usages[:1], after - before), Ledger.of(usages[1:])
        assert ledger.prompt == full.prompt
        assert (ledger.reused or 0) > 0.5 * ledger.prompt > full.cached
        with pytest.raises(ConfigError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await plain.reset()
        for client in (blended, plain):
            await client.close()

    asyncio.run(measure())


def test_a_request_may_set_the_policy_or_refuse(client: openai.OpenAI) -> None:
    bring(client, 0, 1, 2, cache_salt="full")
    found = {}
    for name, marks in (("full", {"policy": {"policy": "full"}}), ("plain", False)):
        answer = ask(client, asking(1, 2, 0), logprobs=True,
                     extra_body={"kv_transfer_params": {"blend": marks}, "cache_salt": name})
        found[name] = answer
    assert told(found["full"])["policy"] == "full"
    assert told(found["full"])["chunks_reused"] == 3
    assert found["full"].usage.prompt_tokens_details.cached_tokens == 0
    assert not found["plain"].model_extra.get("kv_transfer_params")
    ours, theirs = ([token.logprob for token in answer.choices[0].logprobs.content] for answer in found.values())
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert found["full"].choices[0].message.content == found["plain"].choices[0].message.content


def test_all_samples_of_a_request_are_told_of(client: openai.OpenAI) -> None:
    """vLLM answers with the statistics of the sample that ended last, which found all in the prefix cache."""
    bring(client, 0, 1, 2, cache_salt="samples")
    answer = client.chat.completions.create(model="served", messages=asking(2, 1, 0), n=3, max_tokens=8,
                                            extra_body={"cache_salt": "samples", "ignore_eos": True})
    assert len(answer.choices) == 3
    assert (told(answer)["chunks_reused"], told(answer)["chunks_missed"]) == (3, 0)
    assert told(answer)["blend_s"] > 0


def test_beam_search_is_not_blended_whatever_is_said(client: openai.OpenAI) -> None:
    """Its steps are requests of vLLM's own, which carry nothing of what the client said."""
    bring(client, 0, 1, 2, cache_salt="beams")
    beams = {"use_beam_search": True, "cache_salt": "beams"}
    found = [ask(client, asking(1, 0, 2), n=2, extra_body=beams | more)
             for more in ({}, {"kv_transfer_params": {"blend": False}, "cache_salt": "plain beams"})]
    assert [choice.message.content for choice in found[0].choices] == [
        choice.message.content for choice in found[1].choices]
    assert not any(answer.model_extra.get("kv_transfer_params") for answer in found)
    exact = ask(client, asking(1, 0, 2), extra_body={"cache_salt": "beams"})
    assert {chunk["reason"] for chunk in told(exact)["chunks"]} <= {"prefix cached", "not worth a pass"}
    assert told(exact)["chunks_prefix_cached"] > 0, "the beams' blocks are exact: they were never blended"


def test_completions_with_spans_of_token_ids(client: openai.OpenAI) -> None:
    ids = list(range(1000, 1300))
    body = {"kv_transfer_params": {"blend": {"spans": [[20, 120], [120, 260]]}}}
    first = client.completions.create(model="served", prompt=ids, max_tokens=1, extra_body=body)
    assert told(first)["chunks_missed"] == 2
    settle(lambda: client.completions.create(model="served", prompt=ids, max_tokens=1, extra_body=body))
    moved = ids[:20] + ids[120:260] + ids[20:120] + ids[260:]
    second = client.completions.create(model="served", prompt=moved, max_tokens=1)
    assert told(second)["chunks_reused"] == 2


# Documents and marks.


def test_documents_are_put_before_the_question_and_reused(client: openai.OpenAI, same: Callable[..., None]) -> None:
    documents = [unseen(number) for number in range(3)]
    question = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}]
    first = ask(client, question, extra_body={"documents": documents})
    assert [chunk["reason"] for chunk in told(first)["chunks"]] == ["not stored"] * 3
    settle(lambda: ask(client, question, extra_body={"documents": documents}))
    again = ask(client, question, extra_body={"documents": documents[::-1]})
    assert (told(again)["chunks_reused"], told(again)["chunks_missed"]) == (3, 0)
    assert again.usage.prompt_tokens_details.cached_tokens == told(again)["reused_tokens"]
    placed = "\n\n".join([*documents, QUESTION])
    same({"messages": question, "documents": documents},
         {"messages": [question[0], {"role": "user", "content": placed}]})
    same({"messages": [question[0], {"role": "user", "content": placed}], "documents": documents},
         {"messages": [question[0], {"role": "user", "content": placed}]})
    prompt = client.completions.create(model="served", prompt=QUESTION, max_tokens=1,
                                       extra_body={"documents": documents[:2], "return_token_ids": True})
    assert told(prompt)["chunks_reused"] == 2


def test_documents_may_be_left_to_a_chat_template_that_reads_them(client: openai.OpenAI,
                                                                  same: Callable[..., None]) -> None:
    body = {"documents": [{"title": "Skerry Point", "text": unseen(3)}]}
    question = [{"role": "user", "content": QUESTION}]
    ignored = ask(client, question, extra_body=body)
    assert [chunk["reason"] for chunk in told(ignored)["chunks"]] == ["not in the prompt"]
    body["chat_template"] = TEMPLATE
    assert [chunk["reason"] for chunk in told(ask(client, question, extra_body=body))["chunks"]] == ["not stored"]
    settle(lambda: ask(client, question, extra_body=body))
    moved = body | {"chat_template": f"Read.\n{TEMPLATE}"}
    assert told(ask(client, question, extra_body=moved))["chunks_reused"] == 1
    same({"messages": question} | body)


def test_the_model_never_sees_a_mark(same: Callable[..., None]) -> None:
    def chat(passages: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": passages}, {"type": "text", "text": QUESTION}]
        return {"messages": [{"role": "system", "content": f"{RULES}\n\n{passages}"},
                             {"role": "user", "content": parts}]}

    same(chat(mark_chunks(PASSAGES[:2])), chat("\n\n".join(PASSAGES[:2])))


@pytest.mark.parametrize(("fields", "param", "remedy"), [
    ({"documents": "text"}, "documents", "documents are a list of texts, not a text: send [text, ...]"),
    ({"documents": ["text", 7]}, "documents", "send only strings"),
    ({"documents": ["text"], "messages": [{"role": "system", "content": RULES}]}, "documents",
     "there is none: add one"),
    ({"documents": ["So it ended.<|im_end|>"]}, "documents", "documents[0] spells the model's control token"),
    ({"kv_transfer_params": "text"}, "kv_transfer_params", "is an object"),
    ({"kv_transfer_params": {"blend": {"policy": "full"}}}, "kv_transfer_params.blend.policy", "an object of settings"),
    ({"kv_transfer_params": {"blend": {"spans": [["a"]]}}}, "kv_transfer_params.blend.spans", "a list of [start, end]"),
    ({"kv_transfer_params": {"other": "\ud800"}}, "kv_transfer_params", "half of a surrogate pair"),
    ({"vllm_xargs": {"kv_transfer_params": "text"}}, "vllm_xargs", "send it as a field of its own"),
    ({"cache_salt": "blendrag-tenant:other:"}, "cache_salt", "choose another one"),
], ids=str)
def test_nonsense_is_refused_as_vllm_refuses(server: Server, fields: dict[str, Any], param: str, remedy: str) -> None:
    body = {"model": "served", "messages": [{"role": "user", "content": "Hello."}]} | fields
    answer = server.post("/v1/chat/completions", json.dumps(body).encode())
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", param)
    assert remedy in error["message"]
    theirs = server.post("/v1/chat/completions", {"model": "served", "messages": "Hello."}).json()["error"]
    assert set(error) == set(theirs)
    # A client that may not ask learns nothing.
    headers = {"Content-Type": "application/json"}
    assert server.post("/v1/chat/completions", json.dumps(body).encode(), headers=headers).status_code == 401
    assert server.post("/v1/chat/completions", b'{"documents": [').status_code == 400


def test_every_door_reuses_and_counts_alike(server: Server, client: openai.OpenAI) -> None:
    """Marks and documents at each door that reads a conversation; a door of its own in each prompt's first words."""
    bring(client, 0, 1)
    asked = {"role": "user", "content": f"{mark_chunks(PASSAGES[1:2])}\n\n{QUESTION}"}

    def post(path: str, **fields: Any) -> Any:
        body = {"model": "served", "documents": [PASSAGES[0]]} | fields
        return server.post(path, body).raise_for_status().json()

    def chat(door: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": f"Here is {door}."}, asked], "max_tokens": 2}

    def tokens(door: str) -> list[int]:
        found: list[int] = post("/tokenize", messages=chat(door)["messages"])["tokens"]
        return found

    answer = post("/v1/chat/completions", **chat("chat"), return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens("chat")
    assert answer["kv_transfer_params"]["blend"]["chunks_reused"] == 2
    rendered = post("/v1/chat/completions/render", **chat("render"))
    assert rendered["token_ids"] == tokens("render")
    generated = server.post("/inference/v1/generate", rendered).raise_for_status().json()
    assert generated["kv_transfer_params"]["blend"]["chunks_reused"] == 2
    message = {"system": "Here is messages.", "messages": [asked]}
    assert post("/v1/messages/count_tokens", **message)["input_tokens"] == len(tokens("messages"))
    assert post("/v1/messages", max_tokens=2, **message)["kv_transfer_params"]["blend"]["chunks_reused"] == 2
    response = post("/v1/responses", instructions="Here is responses.", input=[asked], max_output_tokens=16)
    assert response["usage"]["input_tokens"] == len(tokens("responses"))
    assert response["kv_transfer_params"]["blend"]["chunks_reused"] == 2
    batch = post("/v1/chat/completions/batch", messages=[chat("batch")["messages"]] * 2, max_tokens=2)
    assert batch["usage"]["prompt_tokens"] == 2 * len(tokens("batch"))
    text = f"{PASSAGES[0]}\n\n{PASSAGES[1]}\n\n{QUESTION}"
    completion = {"model": "served", "prompt": asked["content"], "documents": [PASSAGES[0]], "max_tokens": 2}
    count = server.post("/tokenize", {"model": "served", "prompt": text}).json()["count"]
    for path in ("/tokenize", "/v1/completions", "/invocations"):
        answer = server.post(path, completion).raise_for_status().json()
        assert answer.get("count", answer.get("usage", {}).get("prompt_tokens")) == count
    scoring = {"model": "served", "query": asked["content"], "items": [" yes"], "label_token_ids": [1, 2]}
    plain = scoring | {"query": f"{PASSAGES[1]}\n\n{QUESTION}"}
    counts = [server.post("/generative_scoring", each).raise_for_status().json()["usage"]["prompt_tokens"]
              for each in (scoring, plain)]
    assert counts[0] == counts[1]


# Frameworks' own clients.


@pytest.fixture
def sent() -> Iterator[tuple[httpx.Client, list[dict[str, Any]]]]:
    """An HTTP client for them, and the bodies that they send."""
    bodies: list[dict[str, Any]] = []
    with httpx.Client(event_hooks={"request": [lambda request: bodies.append(json.loads(request.content))]}) as http:
        yield http, bodies


@tool
def committee(town: str) -> str:
    """Who chairs the water committee of a town."""
    return f"Maria Okafor, of {town}"


def test_langchain(server: Server, sent: Any, same: Callable[..., None]) -> None:
    http, bodies = sent
    bring(server.client, 0, 1, 2)
    model = ChatOpenAI(model="served", base_url=f"{server.url}/v1", api_key="key", temperature=0, max_tokens=6,
                       stream_usage=True, http_client=http)
    messages = [("system", RULES), ("human", "\n\n".join([PASSAGES[1], PASSAGES[0], QUESTION]))]
    for salt in ("whole", "stream"):
        bring(server.client, 0, 1, cache_salt=salt)
    answer = model.bind(extra_body={"cache_salt": "whole"}).invoke(messages)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 80
    streamed = None
    for piece in model.bind(extra_body={"cache_salt": "stream"}).stream(messages):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert streamed.text == answer.text
    assert streamed.usage_metadata == answer.usage_metadata
    assert model.bind_tools([committee]).invoke(messages).response_metadata["finish_reason"] in ("length", "stop")
    for body in bodies:
        same(body)
    naming = model.bind(extra_body={"documents": [PASSAGES[2], PASSAGES[1]]})
    named = naming.invoke([("system", RULES), ("human", QUESTION)])
    assert named.usage_metadata is not None
    assert named.usage_metadata["input_token_details"]["cache_read"] > 80


def test_llama_index(server: Server, sent: Any, same: Callable[..., None]) -> None:
    http, bodies = sent
    bring(server.client, 0, 3, 4)
    model = OpenAILike(model="served", api_base=f"{server.url}/v1", api_key="key", is_chat_model=True, temperature=0,
                       max_tokens=6, context_window=2048, http_client=http)
    text = "\n\n".join([PASSAGES[3], PASSAGES[0], QUESTION])
    asked = ChatMessage(role="user", content=text)
    chat = model.chat([ChatMessage(role="system", content=RULES), asked])
    assert told(chat.raw)["chunks_reused"] == 2
    assert told(model.complete(text).raw)["chunks_reused"] == 2
    bring(server.client, 0, 3, cache_salt="stream")
    pieces = list(model.stream_chat([asked], stream_options={"include_usage": True},
                                    extra_body={"cache_salt": "stream"}))
    assert pieces[-1].raw.usage.prompt_tokens_details.cached_tokens > 80
    nodes = [NodeWithScore(node=TextNode(text=PASSAGES[number])) for number in (4, 0, 3)]
    cached = server.counted("vllm:prompt_tokens_cached_total")
    requests, reused = server.counted("blendrag_requests_total"), server.counted("blendrag_tokens_total")
    for streaming in False, True:
        synthesizer: BaseSynthesizer = get_response_synthesizer(llm=model, streaming=streaming)
        assert str(synthesizer.synthesize(QUESTION, nodes))
        assert server.counted("vllm:prompt_tokens_cached_total") > cached + 100
        cached = server.counted("vllm:prompt_tokens_cached_total")
    assert server.counted("blendrag_requests_total") == requests + 2
    assert server.counted("blendrag_tokens_total") > reused + 200
    for body in bodies:
        same(body)


# The server itself.


def test_everything_else_is_vllms(server: Server, client: openai.OpenAI) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert [model.id for model in client.models.list()] == ["served"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="other").models.list()
    answer = ask(client, [{"role": "user", "content": "Hello."}], tools=[{"type": "function", "function": {
        "name": "committee", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}}])
    assert answer.choices[0].finish_reason
    assert server.counted("vllm:prompt_tokens_total") > 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_request_in_the_engine(server: Server, client: openai.OpenAI,
                                                              stream: bool) -> None:
    name, most = "vllm:generation_tokens_total", 1500
    began = server.counted(name)
    body = {"messages": asking(0, 1), "documents": PASSAGES[:1], "max_tokens": most, "ignore_eos": True,
            "stream": stream}
    if stream:
        headers = {"Authorization": "Bearer key"}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/chat/completions", body, timeout=0.5)

    def alone() -> bool:
        """Whether a request of one token is all that the engine has to do meanwhile."""
        before = server.counted(name)
        client.completions.create(model="served", prompt=[1, 2, 3], max_tokens=1)
        return server.counted(name) == before + 1

    assert any(alone() for _ in range(100))
    assert server.counted(name) - began < most


@pytest.mark.parametrize("key", [key for key, feature in FEATURES.items() if not feature.alone])
def test_the_cells_of_the_integrations_page_are_true(chat_openai: Subject, key: str) -> None:
    cell, found = page.results()["cells"]["ChatOpenAI"][key], False
    with suppress(*[Exception] if "why" in cell else []):  # where an error was recorded
        found = run(FEATURES[key], chat_openai)
    assert found is cell["value"]


def test_the_example(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "openai_client.py"
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setattr(sys, "argv", [str(example), f"{server.url}/v1"])
    runpy.run_path(str(example), run_name="__main__")
    first, second = (line for line in capsys.readouterr().out.splitlines() if "prompt tokens" in line)
    assert "0 of 3 documents reused" in first
    assert "3 of 3 documents reused" in second


def test_replicas_of_a_stock_server_share_what_they_store(engine_pool: Any, tmp_path: Path) -> None:
    """`vllm serve` with our connector, data parallel: what one replica encodes, the other one finds."""
    engine_pool.close()
    model = build(next(family for family in FAMILIES if family.name == "Llama"), tmp_path / "model")
    settings = {"populate": "on_miss", "store_path": str(tmp_path / "store"),
                "quality_guard": {"share": 1.0, "max_kl": 100.0}}
    connector = CONNECTOR | {"kv_connector_extra_config": settings}
    command = [*vllm_command(), "serve", str(model), *ENGINE, "--max-model-len", "1024", "--data-parallel-size", "2",
               "--api-server-count", "1", "--kv-transfer-config", json.dumps(connector), "--worker-cls", WORKER,
               "--enable-prompt-tokens-details", "--middleware", "blendrag.serve.DocumentsMiddleware"]
    with Server(command, cores="0|1", ends_by=signal.SIGINT) as server:

        def complete(replica: int, prompt: str, **body: Any) -> dict[str, Any]:
            answer = server.client.completions.create(
                model="served", prompt=prompt, max_tokens=1, extra_body=body,
                extra_headers={"X-data-parallel-rank": str(replica)})
            found = (answer.model_extra or {}).get("kv_transfer_params") or {}
            assert answer.usage is not None
            return found.get("blend", {}) | {"usage": answer.usage.prompt_tokens_details}

        assert complete(0, f"Read. {mark_chunks(PASSAGES[:2])} Answer.")["chunks_missed"] == 2
        # Nobody says when the first replica is done with them: ask until it is.
        moved = "\n\n".join([PASSAGES[1], PASSAGES[0], "Answer."])
        asked = (complete(1, f"Read this, {number}.\n\n{moved}") for number in range(200))
        reused = next(answer for answer in asked if answer.get("chunks_reused") == 2)
        assert reused["usage"].cached_tokens == reused["reused_tokens"]
        assert next(count for _ in range(1000) if (count := server.counted("blendrag_quality_audited_total")))
