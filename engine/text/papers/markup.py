"""The text of an HTML page: what a reader sees of it, without tags, scripts and styles.

Part of the child process engine/text/papers/worker.py; imports the standard library alone.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

UNSEEN = frozenset("script style template noscript head title svg math object iframe".split())
BLOCKS = frozenset(
    "address article aside blockquote body dd details dialog div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section summary table tr ul "
    "caption tbody thead tfoot".split()
)
APART = frozenset("p h1 h2 h3 h4 h5 h6 pre blockquote table ul ol dl section article".split())
# an element of these has no end tag that a page must write
EMPTY = frozenset("br hr img input meta link area base col embed source track wbr".split())


class TooLong(Exception):
    """The text is longer than was asked for."""


def tidied(text: str) -> str:
    """Text without spaces at the ends of lines and without more than one empty line in a row."""
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


class Page(HTMLParser):
    """Collects what is seen of a page. most: characters of text; TooLong beyond."""

    def __init__(self, most: int) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._most, self._unseen, self._kept = most, "", 0
        self._depth = 0  # of elements named `_unseen` within each other

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """An element begins."""
        if self._unseen:
            self._depth += tag == self._unseen
        elif tag in UNSEEN:
            self._unseen, self._depth = tag, 1
        elif tag == "body":
            self.parts.append("\n")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append("\t")
        elif tag in BLOCKS:
            self._kept += tag == "pre"
            self.parts.append("\n\n" if tag in APART else "\n")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """<br/>, and what XHTML closes where it opens."""
        if tag in EMPTY or tag not in UNSEEN:
            self.handle_starttag(tag, attrs)
            if tag not in EMPTY:
                self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        if self._unseen:
            self._depth -= tag == self._unseen
            if not self._depth or self._unseen == "head" and tag == "head":
                self._unseen = ""
        elif tag in BLOCKS:
            self._kept -= tag == "pre" and self._kept > 0
            self.parts.append("\n\n" if tag in APART else "\n")

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if self._unseen:
            return
        self._most -= len(data)
        if self._most < 0:
            raise TooLong
        self.parts.append(data if self._kept else re.sub(r"[ \t\r\n\f]+", " ", data))


def seen(html: str, most: int) -> str:
    """The text of a page, at most `most` characters. Raises TooLong."""
    page = Page(most)
    page.feed(html)
    page.close()
    lines = "".join(page.parts).split("\n")
    return tidied("\n".join(re.sub(" {2,}", " ", line).strip(" \t") for line in lines))
