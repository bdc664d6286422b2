"""Text of HTML pages."""

from __future__ import annotations

import re

_DROPPED = ["script", "style", "noscript", "template", "nav", "svg", "head", "title", "button", "select", "iframe"]
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_PARAGRAPHS = ["p", "div", "section", "article", "main", "header", "footer", "aside", "blockquote", "pre", "ul", "ol",
               "dl", "table", "figure", "figcaption", "form", "hr", *_HEADINGS]
_LINES = ["tr", "dt", "dd"]
_SPACE = re.compile(r"[ \t\r\n\f]+")


def html_text(markup: str) -> str:
    """The visible text: paragraphs apart, headings and list items as in Markdown, table cells between bars.

    Menus, scripts and styles are left out.  `<pre>` keeps its line breaks.
    """
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString

    soup = BeautifulSoup(markup, "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    for tag in soup.find_all(_DROPPED):
        tag.decompose()
    for string in list(soup.find_all(string=True)):
        if type(string) is NavigableString and string.find_parent(["pre", "textarea"]) is None:
            string.replace_with(_SPACE.sub(" ", string))
    for tag in soup.find_all("br"):
        tag.replace_with("\n")
    for tag in soup.find_all("li"):
        tag.insert_before("\n- ")
    for tag in soup.find_all(["td", "th"]):
        if tag.find_next_sibling(["td", "th"]):
            tag.insert_after(" | ")
    for tag in soup.find_all(list(_HEADINGS)):
        words = _SPACE.sub(" ", tag.get_text()).strip()
        tag.clear()
        tag.append(_HEADINGS[tag.name] + words if words else "")
    for names, gap in ((_LINES, "\n"), (_PARAGRAPHS, "\n\n")):
        for tag in soup.find_all(names):
            tag.insert_before(gap)
            tag.insert_after(gap)
    text = soup.get_text()
    if title and not re.search(r"^# ", text, re.MULTILINE):
        text = f"# {_SPACE.sub(' ', title)}\n\n{text}"
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ (?! )", "", text, flags=re.MULTILINE)
    text = re.sub(r"^-\n+", "- ", text, flags=re.MULTILINE)  # a paragraph in a list item
    return re.sub(r"\n{3,}", "\n\n", text).strip()
