"""Random conversations with documents in them, and chat templates that handle their texts in different ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from blendrag.adapters.sentinels import cut_space
from blendrag.pairs import CLOSE, LITERAL, OPEN
from blendrag.prompt import escape_marks, mark_chunks

_TURN = "{% for message in messages %}"
TEMPLATES = {
    "chatml": _TURN + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
                      "<|im_start|>assistant\n",
    "llama3": "{{ bos_token }}" + _TURN + "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
              "{{ message['content'] | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>" + _TURN + "{% if message.role == 'assistant' %} {{ message.content }}</s>"
               "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}",
    "gemma": "<bos>" + _TURN + "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
             "{{ message.content.strip() }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
    "json": _TURN + "{{ message | tojson }}\n{% endfor %}assistant: ",
}
"""In the manner of these model families; "json" is like those that show messages or tool results as JSON."""

TRIMMING = {"llama3", "gemma"}
ROLES = ("system", "user", "assistant", "tool")

_SPELLINGS = ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "[INST]", "<|endoftext|>"]
_PRIVATE = ["\ue000", "\ue001", "\ue0013", OPEN, CLOSE, *OPEN, CLOSE[-1], "\uf2aa", "\uf2ab", "\uf2ac"]
_WORDS = [" ", "\n", "\t", "\u2028", "\x1f", "{{ x }}", '"', "\\n", "<b>", "é😀", "word", " The river", "1"]
_pieces = st.lists(st.sampled_from([*_SPELLINGS, *_PRIVATE, *_WORDS]) | st.text(max_size=4), max_size=6).map("".join)


def _closes_nothing(text: str) -> bool:
    """Whether all marks in a text are malformed, so that they are text."""
    _, opening, behind = text.partition(OPEN)
    return LITERAL not in text and not (opening and CLOSE in behind)


texts = _pieces.filter(_closes_nothing)
documents = _pieces


@dataclass(frozen=True)
class Message:
    """Texts around documents: one text more than there are documents."""

    role: str
    texts: list[str]
    documents: list[str]
    escaped: bool

    def content(self, document: Callable[[str], str], text: Callable[[str], str] = str) -> str:
        """The message with each of its documents, and each text between them, written in some way."""
        pieces = [text(self.texts[0])]
        for place, after in zip(self.documents, self.texts[1:], strict=True):
            pieces += [document(place), text(after)]
        return "".join(pieces)

    @property
    def plain(self) -> str:
        """What a framework alone would send."""
        return self.content(str)

    @property
    def marked(self) -> str:
        """What it sends with its documents marked."""
        return self.content(lambda text: mark_chunks([text]), escape_marks if self.escaped else str)

    def chunks(self, template: str) -> list[tuple[str, str]]:
        """What the chunk of each document is at least and at most: trimming takes white space at a message's ends."""
        found = []
        for number, document in enumerate(self.documents):
            before, core, after = cut_space(document)
            if not core:
                continue
            if template == "json":
                core = json.dumps(core, ensure_ascii=False)[1:-1]
                found.append((core, before + core + after))
                continue
            outside = "".join([*self.texts[:number + 1], *self.documents[:number]])
            behind = "".join([*self.texts[number + 1:], *self.documents[number + 1:]])
            least = ("" if template in TRIMMING and not outside.strip() else before) + core + (
                "" if template in TRIMMING and not behind.strip() else after)
            found.append((least, document))
        return found


@st.composite
def messages(draw: Any) -> Message:
    """One message."""
    inside = draw(st.lists(documents, max_size=3))
    around = draw(st.lists(texts, min_size=len(inside) + 1, max_size=len(inside) + 1))
    return Message(draw(st.sampled_from(ROLES)), around, inside, draw(st.booleans()))


conversations = st.lists(messages(), min_size=1, max_size=5)


def check_chunks(found: list[str], conversation: list[Message], template: str) -> None:
    """Asserts that these are the documents of a conversation, and nothing else."""
    bounds = [bound for message in conversation for bound in message.chunks(template)]
    assert len(found) == len(bounds)
    for chunk, (least, most) in zip(found, bounds, strict=True):
        assert least in chunk
        assert chunk in most
