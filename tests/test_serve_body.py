"""What the server's middleware makes of the bodies of requests."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag import DELIMITER, BlendConfig, mark_chunks
from blendrag.errors import PromptError
from blendrag.serve.body import rewrite_chat, rewrite_completion

CONFIG = BlendConfig()
A, B = "The lighthouse was built in 1847.", "The dairy keeps two hundred goats."


def chat(*contents, config=CONFIG, **fields):
    """The body after rewriting, and its documents; contents are those of a system and then of user messages."""
    roles = ["system", *["user"] * len(contents)] if len(contents) > 1 else ["user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    body = {"messages": messages} | fields
    rewritten(rewrite_chat, body, config)
    return [message["content"] for message in messages], named(body), body


def completion(prompt, config=CONFIG, **fields):
    body = {"prompt": prompt} | fields
    rewritten(rewrite_completion, body, config)
    return body["prompt"], named(body), body


def rewritten(rewrite, body, config):
    """What is not said to be changed goes on as the bytes that came."""
    before = copy.deepcopy(body)
    assert rewrite(body, config) or body == before


def named(body):
    marks = (body.get("kv_transfer_params") or {}).get("blend") or {}
    return marks.get("documents", [])


def test_what_stands_between_delimiters_is_a_document_and_the_delimiters_are_gone():
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
    assert rewrite_chat(body, CONFIG)
    assert (body["messages"][0]["content"], named(body)) == (A, [A])


def test_settings_say_what_the_delimiter_is_and_whether_it_stays():
    config = BlendConfig(delimiter=" # # ")
    text = mark_chunks([A, B], " # # ")
    assert chat(text, config=config)[:2] == ([f"{A}\n\n{B}"], [A, B])
    assert chat(text)[:2] == ([text], [])
    kept = BlendConfig(delimiter=" # # ", keep_delimiter=True)
    assert chat(text, config=kept)[:2] == ([text], [A, B])


@given(st.lists(st.text(st.sampled_from("ab \n\ue000\ue001012"), max_size=12), min_size=1, max_size=4))
def test_the_model_reads_what_it_would_read_without_delimiters(texts):
    contents, documents, _ = chat(f"Read: {mark_chunks(texts)}.")
    assert contents == ["Read: " + "\n\n".join(texts) + "."]
    assert documents == [text for text in texts if text.strip()]


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


def test_what_a_request_says_besides_is_kept():
    transfer = {"other": 1, "blend": {"policy": {"policy": "full"}, "documents": [B]}}
    _, _, body = chat("Who?", documents=[A], kv_transfer_params=transfer)
    assert body["kv_transfer_params"] == {"other": 1, "blend": {"policy": {"policy": "full"}, "documents": [B, A]}}
    contents, _, body = chat("Who?", documents=[A], kv_transfer_params={"blend": False})
    assert (contents, body["kv_transfer_params"]) == ([f"{A}\n\nWho?"], {"blend": False})
    assert completion([1, 2, 3], documents=[A])[:2] == ([1, 2, 3], [A])


@pytest.mark.parametrize("body", [
    {"messages": [{"role": "user", "content": "Who?"}]},
    {"messages": "Who?", "documents": [A]},
    {"messages": [7, {"role": "user"}]},
    {"messages": [{"role": "user", "content": "Who?"}], "documents": []},
    {"prompt": "Who?", "documents": None},
    {"prompt": {"text": "Who?"}},
    {},
], ids=str)
def test_other_bodies_are_left_alone(body):
    rewrite = rewrite_completion if "prompt" in body else rewrite_chat
    seen = copy.deepcopy(body)
    assert not rewrite(seen, CONFIG)
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
        with pytest.raises(PromptError, match=remedy):
            ask("Who?", documents=documents)


def test_documents_need_a_place():
    with pytest.raises(PromptError, match="there is none: add one"):
        rewrite_chat({"messages": [{"role": "system", "content": "Be brief."}], "documents": [A]}, CONFIG)
    with pytest.raises(PromptError, match="send a list of strings"):
        completion("Who?", documents=[{"text": A}])
    with pytest.raises(PromptError, match="not a text: send"):
        chat("Who?", documents=[A], kv_transfer_params={"blend": {"documents": A}})


def test_a_delimiter_alone_is_no_document():
    assert chat(f"Who{DELIMITER} built it?")[:2] == (["Who built it?"], [])
    assert completion(f"Who{DELIMITER} built it?")[:2] == ("Who built it?", [])


def test_a_blank_document_is_none():
    assert chat("Who?", documents=["", " \n"]) == (["Who?"], [], {"messages": [{"role": "user", "content": "Who?"}]})
