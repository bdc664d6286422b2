"""Reading folders of documents, and splitting them."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendrag.documents import DocumentWarning, Source, read_folder, split
from blendrag.errors import DocumentError

PAGE = """<html><head><title>A page</title><style>p {color: red}</style></head><body>
<nav>Home | About</nav><h1>Trees &amp; shrubs</h1><p>An <b>oak</b> is
a tree.<br>So is a fir.</p><script>alert("no")</script>
<ul><li>oak<li><p>fir</p></li></ul>
<table><tr><th>name</th><th>height</th></tr><tr><td>oak</td><td>30 m</td></tr></table>
<pre>  kept
    as it is</pre></body></html>"""

GERMAN = "Grüße aus der schönen Stadt Köln, überall blühen Bäume."


def pdf(*pages: str) -> bytes:
    """A PDF with one line of text on each page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [b"<</Type/Catalog/Pages 2 0 R>>",
               f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode(),
               b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    for number, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
        objects += [f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {5 + 2 * number} 0 R"
                    "/Resources<</Font<</F1 3 0 R>>>>>>".encode(),
                    b"<</Length %d>>stream\n%s\nendstream" % (len(content), content)]
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return data + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1, table, len(objects) + 1, len(data))


def words(text: str) -> int:
    """A tokenizer: words, and each sign by itself."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def bare(text: str) -> str:
    return "".join(text.split())


def test_reads_every_kind_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/two.txt").write_text("two")
    (tmp_path / "b/one.pdf").write_bytes(pdf("page one", "page two"))
    (tmp_path / "c.HTML").write_text(PAGE)
    (tmp_path / "a.md").write_bytes(b"# A\r\n\r\ntext\r\n")
    (tmp_path / "z.py").write_text("not a document")
    assert [(s.path, s.text) for s in read_folder(tmp_path)][:3] == [
        ("a.md", "# A\n\ntext"), ("b/one.pdf", "page one\n\npage two"), ("b/two.txt", "two")]
    assert len(read_folder(tmp_path)) == 4


def test_html_keeps_what_a_reader_sees(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    assert read_folder(tmp_path)[0].text == (
        "# Trees & shrubs\n\nAn oak is a tree.\nSo is a fir.\n\n- oak\n- fir\n\nname | height\n\noak | 30 m\n\n"
        "  kept\n    as it is")


def test_html_without_a_heading_takes_its_title(tmp_path: Path) -> None:
    (tmp_path / "page.htm").write_text("<title>Oaks</title><p>An oak is a tree.")
    assert read_folder(tmp_path)[0].text == "# Oaks\n\nAn oak is a tree."


@pytest.mark.parametrize(("name", "data"), [
    ("a.txt", GERMAN.encode("cp1252")),
    ("a.txt", GERMAN.encode("utf-16")),
    ("a.md", GERMAN.encode("utf-8-sig")),
    ("a.html", b'<meta charset="iso-8859-1"><p>' + GERMAN.encode("latin-1")),
])
def test_other_encodings(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert read_folder(tmp_path)[0].text == GERMAN


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/readme.md").write_text("no")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "shown.txt").write_text("yes")
    assert read_folder(tmp_path) == [Source("shown.txt", "yes")]


@pytest.mark.parametrize(("name", "data", "reason"), [
    ("junk.txt", bytes(range(256)) * 4, "binary"),
    ("broken.pdf", b"%PDF-1.4 no more of it", ""),
    ("scan.pdf", pdf(""), "OCR"),
    ("empty.md", b" \n", "no text"),
])
def test_a_file_that_cannot_be_read_is_named_and_skipped(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / name).write_bytes(data)
    with pytest.warns(DocumentWarning, match=f"{name} was skipped: .*{reason}"):
        assert read_folder(tmp_path) == [Source("good.txt", "good")]


def test_a_dangling_link_and_a_pipe_do_not_stop_the_rest(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read_folder(tmp_path) == [Source("good.txt", "good")]
    assert len(caught) == 2


def test_nothing_to_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="does not exist: name a folder"):
        read_folder(tmp_path / "missing")
    with pytest.raises(DocumentError, match=r"holds no document .* name a folder"):
        read_folder(tmp_path)
    (tmp_path / "bad.pdf").write_bytes(b"bad")
    with pytest.warns(DocumentWarning), pytest.raises(DocumentError, match="holds no document"):
        read_folder(tmp_path)


def test_a_single_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("one")
    assert read_folder(tmp_path / "one.md") == [Source("one.md", "one")]


def test_cuts_before_headings_and_keeps_them_with_their_text() -> None:
    sections = [f"## Part {n}\n\n" + " ".join(f"Sentence {n} number {m}." for m in range(6)) for n in range(8)]
    chunks = split(Source("a.md", "\n\n".join(sections)), words, 72)
    assert [chunk.text for chunk in chunks] == ["\n\n".join(sections[n : n + 2]) for n in range(0, 8, 2)]
    assert [chunk.heading for chunk in chunks] == ["Part 0", "Part 2", "Part 4", "Part 6"]
    assert {chunk.source for chunk in chunks} == {"a.md"}


@pytest.mark.parametrize("tokens", range(16, 40))
def test_no_chunk_ends_with_a_heading(tokens: int) -> None:
    text = "\n\n".join(f"# Top {n}\n\n## Part {n}\n\nOne two three four five six. Seven eight nine ten.\n\n"
                       f"Title {n}\n===\n\n- one two three\n- four five six" for n in range(6))
    for chunk in split(Source("a.md", text), words, tokens):
        assert not re.search(r"^(#+ .*|===)\Z", chunk.text, re.MULTILINE), chunk.text


def test_headings_inside_fenced_code_are_none() -> None:
    text = "# Real\n\n```sh\n" + "\n".join(f"# comment {n}" for n in range(40)) + "\n```\n\nEnd."
    chunks = split(Source("a.md", text), words, 32)
    assert {chunk.heading for chunk in chunks} == {"Real"}


def test_cuts_prose_at_sentences() -> None:
    text = " ".join(f"This is the sentence that has\nthe number {n}." for n in range(40))
    assert all(chunk.text.endswith(".") for chunk in split(Source("a.txt", text), words, 32))


def test_code_keeps_its_indentation() -> None:
    text = "\n".join(f"    line {n} of the code" for n in range(60))
    assert all(chunk.text.startswith("    line") for chunk in split(Source("a.txt", text), words, 20))


def test_chunks_are_of_even_size() -> None:
    text = "\n\n".join(f"Paragraph {n} has eight words in it." for n in range(100))
    sizes = [chunk.tokens for chunk in split(Source("a.txt", text), words, 64)]
    assert min(sizes) >= 16
    assert sum(sizes) / len(sizes) >= 48


@given(st.text(st.sampled_from("ab1.!# \n\t`-=|。é😀"), max_size=600) | st.text(max_size=200), st.integers(16, 60))
@example("x" * 500, 16)
@example("```\n" * 40, 16)
@example("# \n" * 40, 16)
@example("\n".join([" a"] * 80), 16)
def test_only_white_space_is_lost_and_the_budget_is_kept(text: str, tokens: int) -> None:
    def characters(piece: str) -> int:
        return len(piece)

    chunks = split(Source("a.md", text), characters, tokens)
    assert bare("".join(chunk.text for chunk in chunks)) == bare(text)
    assert all(0 < chunk.tokens == characters(chunk.text) <= tokens for chunk in chunks)
    assert all(chunk.text.strip() for chunk in chunks)


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(DocumentError, match="choose 16 or more"):
        split(Source("a.md", "text"), words, 15)
