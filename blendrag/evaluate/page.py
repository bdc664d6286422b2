"""The frame of a report: one HTML file that needs no other, light or dark as its reader's system is."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files


def page(title: str, heading: str, what: str, sections: Iterable[str]) -> str:
    """The whole file.

    Args:
        title: for the browser's tab.
        what: a line below the heading: what was measured, on what.
        sections: HTML.
    """
    style = files("blendrag.evaluate").joinpath("report.css").read_text("utf-8")
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{style}</style></head><body><main><h1>{escape(heading)}</h1>"
            f'<p class="what">{escape(what)}</p>{"".join(sections)}</main></body></html>\n')
