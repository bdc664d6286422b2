"""What the server makes of the texts in the bodies of requests."""

import copy
import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag import DELIMITER, BlendConfig, mark_chunks
from blendrag.errors import PromptError, RequestError
from blendrag.serve.body import rewrite
from blendrag.serve.rewriting import Rewriting
from blendrag.serve.routes import ROUTES

CONFIG = BlendConfig()
A, B = "The lighthouse was built in 1847.", "The dairy keeps two hundred goats."
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def rewritten(path, body, config=CONFIG):
    """The texts of the documents; what is not said to be changed goes on as the bytes that came."""
    before = copy.deepcopy(body)
    documents, changed = rewrite(body, ROUTES[path], config)
    assert changed or body == before
    return [document.text for document in documents]


def chat(*contents, config=CONFIG, path=CHAT, **fields):
    """Contents after rewriting, documents, and the body; contents are those of a system and then of user messages."""
    roles = ["system", *["user"] * len(contents)] if len(contents) > 1 else ["user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    body = {"messages": messages} | fields
    documents = rewritten(path, body, config)
    return [message["content"] for message in messages], documents, body


def completion(prompt, config=CONFIG, **fields):
    body = {"prompt": prompt} | fields
    documents = rewritten(COMPLETION, body, config)
    return body["prompt"], documents, body


def test_what_stands_between_marks_is_a_document_and_the_marks_are_gone():
    marked = f"Read this.\n{mark_chunks([A, B])}\nWho built it?"
    plain = f"Read this.\n{A}\n\n{B}\nWho built it?"
    assert chat(marked)[:2] == ([plain], [A, B])
    assert chat("Be brief.", marked)[:2] == (["Be brief.", plain], [A, B])
    assert completion(marked)[:2] == (plain, [A, B])
    assert completion([marked, "Hello."])[:2] == ([plain, "Hello."], [A, B])


def test_every_part_and_every_role_may_have_documents():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    content = [{"type": "text", "text": mark_chunks([A])}, image, mark_chunks([B]), {"type": "text", "text": "Who?"}]
    assert chat(content)[:2] == ([[{"type": "text", "text": A}, image, B, {"type": "text", "text": "Who?"}]], [A, B])
    body = {"messages": [{"role": "tool", "tool_call_id": "1", "content": mark_chunks([A])},
                         {"role": "assistant", "content": None}]}
    assert rewritten(CHAT, body) == [A]
    assert body["messages"][0]["content"] == A


def test_settings_say_what_the_delimiter_is_and_whether_it_stays():
    config = BlendConfig(delimiter=" # # ")
    text = mark_chunks([A, B], " # # ")
    assert chat(text, config=config)[:2] == ([f"{A}\n\n{B}"], [A, B])
    assert chat(text)[:2] == ([text], [])
    kept = BlendConfig(delimiter=" # # ", keep_delimiter=True)
    assert chat(text, config=kept)[:2] == ([text], [A, B])


@given(st.lists(st.text(st.sampled_from("ab \n\ue000\uf4b1\ue8d3\uf2a7\uf2a8"), max_size=12), min_size=1, max_size=4))
def test_the_model_reads_what_it_would_read_without_marks(texts):
    contents, documents, _ = chat(f"Read: {mark_chunks(texts)}.")
    assert contents == ["Read: " + "\n\n".join(texts) + "."]
    assert documents == list(dict.fromkeys(text for text in texts if text.strip()))


def test_documents_that_stand_in_the_messages_stay_there():
    text = f"{B}\n\n{A}\n\nWho built it?"
    contents, documents, body = chat("Be brief.", text, documents=[f" {A}\n", B])
    assert (contents, documents) == (["Be brief.", text], [f" {A}\n", B])
    assert "documents" not in body
    assert completion(text, documents=[A])[:2] == (text, [A])


def test_documents_that_stand_nowhere_are_put_before_the_last_user_message():
    assert chat("Be brief.", "Hello.", "Who built it?", documents=[A, B])[:2] == (
        ["Be brief.", "Hello.", f"{A}\n\n{B}\n\nWho built it?"], [A, B])
    assert chat("Be brief.", f"{B} Who built it?", documents=[A, B, A])[0] == ["Be brief.", f"{A}\n\n{B} Who built it?"]
    assert chat(None, documents=[A])[0] == [A]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert chat([image], documents=[A])[0] == [[{"type": "text", "text": A}, image]]
    assert chat([image, {"type": "text", "text": "Who?"}], documents=[A])[0] == [
        [image, {"type": "text", "text": f"{A}\n\nWho?"}]]
    assert completion("Who built it?", documents=[A, B])[0] == f"{A}\n\n{B}\n\nWho built it?"
    assert completion(["Who?", f"{A} Who?"], documents=[A])[0] == [f"{A}\n\nWho?", f"{A} Who?"]


def test_mappings_are_left_to_the_chat_template():
    given = [{"title": "Skerry Point", "text": A}, {"content": B}, {"title": "Nothing"}]
    contents, documents, body = chat("Who built it?", documents=given)
    assert (contents, documents, body["documents"]) == (["Who built it?"], [A, B], given)


@pytest.mark.parametrize("body", [
    {"messages": [{"role": "user", "content": "Who?"}]},
    {"messages": [7, {"role": "user"}]},
    {"messages": [{"role": "user", "content": "Who?"}], "documents": []},
    {"prompt": "Who?", "documents": None},
    {"prompt": {"text": "Who?"}},
    {},
], ids=str)
def test_other_bodies_are_left_alone(body):
    seen = copy.deepcopy(body)
    assert rewrite(seen, ROUTES[COMPLETION if "prompt" in body else CHAT], CONFIG) == ([], False)
    assert seen == body


@pytest.mark.parametrize(("documents", "remedy"), [
    ("text", "not a text: send"),
    (7, "not a number: send"),
    ([A, 7], "not a number: send only strings"),
    ([A, {"text": B}], "not an object: send only strings"),
    (["half \ud800"], "surrogate pair"),
])
def test_documents_that_are_none_are_refused(documents, remedy):
    for ask in (chat, completion):
        with pytest.raises(RequestError, match=remedy) as caught:
            ask("Who?", documents=documents)
        assert caught.value.param == "documents"


def test_documents_need_a_place():
    with pytest.raises(PromptError, match="there is none: add one"):
        rewritten(CHAT, {"messages": [{"role": "system", "content": "Be brief."}], "documents": [A]})
    with pytest.raises(PromptError, match="send a list of strings"):
        completion("Who?", documents=[{"text": A}])


def test_a_mark_alone_and_private_use_characters_are_text():
    for text in (f"Who{DELIMITER} built {DELIMITER}it?", mark_chunks([A])[:-1], mark_chunks([A])[1:], "\uf4b1\ue8d3"):
        assert chat(text)[:2] == ([text], [])
        assert completion(text)[:2] == (text, [])


def test_a_blank_document_is_none():
    assert chat("Who?", documents=["", " \n"]) == (["Who?"], [], {"messages": [{"role": "user", "content": "Who?"}]})


def test_a_document_is_looked_for_before_marks_are_read():
    odd = f"Icons: {mark_chunks(['home'])} and {DELIMITER}."
    assert chat(f"{odd}\n\nWho?", documents=[odd])[:2] == ([f"{odd}\n\nWho?"], [odd])
    text = f"{mark_chunks([odd, A])} Who?"
    assert chat(text, documents=[odd])[:2] == ([f"{odd}\n\n{A} Who?"], [odd, A])


def test_a_document_is_looked_for_in_one_text_at_a_time():
    assert chat("The light", "house", documents=["The lighthouse"])[0] == ["The light", "The lighthouse\n\nhouse"]


def test_every_door_takes_documents_and_marks():
    marked = mark_chunks([A])
    responses = {"documents": [B], "instructions": marked, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        {"type": "function_call_output", "output": marked}]}
    assert rewritten("/v1/responses", responses) == [A, B]
    assert responses == {"instructions": A, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": f"{B}\n\nWho?"}]},
        {"type": "function_call_output", "output": A}]}
    plain = {"input": "Who?", "documents": [B]}
    assert rewritten("/v1/responses", plain) == [B]
    assert plain == {"input": f"{B}\n\nWho?"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": marked}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        message = {"system": [{"type": "text", "text": marked}], "messages": [
            {"role": "user", "content": [copy.deepcopy(result)]}], "documents": [B]}
        assert rewritten(path, message) == [A, B]
        assert message["system"] == [{"type": "text", "text": A}]
        assert message["messages"][0]["content"] == [result | {"content": [{"type": "text", "text": A}]},
                                                     {"type": "text", "text": B}]
    batch = {"messages": [[{"role": "user", "content": f"{A} Who?"}], [{"role": "user", "content": "When?"}]],
             "documents": [A]}
    assert rewritten("/v1/chat/completions/batch", batch) == [A]
    assert [messages[0]["content"] for messages in batch["messages"]] == [f"{A} Who?", f"{A}\n\nWhen?"]
    scoring = {"query": marked, "items": ["yes", marked]}
    assert rewritten("/generative_scoring", scoring) == [A]
    assert scoring == {"query": A, "items": ["yes", A]}
    decisions = {"state": {"notes": [marked, 7]}, "instructions": "Decide."}
    assert rewritten("/v1/systemone", decisions) == [A]
    assert decisions["state"] == {"notes": [A, 7]}
    cohere = {"messages": [{"role": "user", "content": marked}], "documents": [B, {"data": {"snippet": "Skerry"}}]}
    assert rewritten("/cohere/v2/chat", cohere) == [A, B, "Skerry"]
    assert cohere["documents"] == [B, {"data": {"snippet": "Skerry"}}]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize", "/invocations"])
def test_doors_beside_a_chat_see_its_prompt(path):
    assert chat(mark_chunks([A]), documents=[B], path=path)[:2] == ([f"{B}\n\n{A}"], [A, B])


def test_mappings_reach_the_chat_template_where_vllm_knows_no_such_field():
    _, documents, body = chat("Who?", documents=[{"text": A}], path="/tokenize")
    assert (documents, body["chat_template_kwargs"]) == ([A], {"documents": [{"text": A}]})


@pytest.mark.parametrize("path", ["/generative_scoring", "/v1/systemone", "/inference/v1/generate"])
def test_where_documents_have_no_place_the_error_says_where_they_do(path):
    with pytest.raises(RequestError, match="send them to /v1/chat/completions"):
        rewritten(path, {"query": "Who?", "items": [], "state": "", "token_ids": [1], "documents": [A]})


def test_documents_are_bounded():
    with pytest.raises(RequestError, match="3 documents are too many: send 2 at most"):
        chat("Who?", documents=["a", "b", "c"], config=BlendConfig(max_documents=2))
    with pytest.raises(RequestError, match="the text marks 2 documents: mark 1 at most"):
        chat(mark_chunks([A, B]), config=BlendConfig(max_documents=1))
    with pytest.raises(RequestError, match="send fewer prompts at a time"):
        completion(["Who?"] * 300, documents=[A])


_TEXT = st.text("ab \ue000\uf4b1\ud800", max_size=4)
_JSON = st.recursive(st.none() | st.integers() | _TEXT, lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "content", "role", "type", "output", "input"]), inner,
                                         max_size=3), max_leaves=8)
_FIELDS = ["messages", "prompt", "input", "instructions", "system", "query", "items", "state", "model", "tools"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), st.dictionaries(st.sampled_from(_FIELDS), _JSON), st.booleans())
def test_the_bytes_of_stock_clients_never_change(path, body, escaped):
    content = json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    assert Rewriting(CONFIG, lambda: None)(content, path) is content


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), st.dictionaries(st.sampled_from([*_FIELDS, "documents", "cache_salt",
                                                                        "kv_transfer_params", "vllm_xargs"]), _JSON))
def test_any_body_is_rewritten_or_refused(path, body):
    with suppress(RequestError):
        Rewriting(CONFIG, lambda: None)(json.dumps(body).encode(), path)
