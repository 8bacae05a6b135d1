"""GET /: the page, one static document that loads nothing from anywhere else.

It is the same for everybody and knows nothing, so it needs no key: a browser cannot send one when
it opens a page. The page asks for the key and sends it with its requests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

# in this order one script
SCRIPTS = (
    "base",
    "document",
    "files",
    "reading",
    "markdown",
    "words",
    "answers",
    "conversation",
    "saved",
    "export",
    "settings",
    "main",
)


def joined(folder: Path) -> str:
    """The page's text: its markup with the style and the scripts of a folder in it."""

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    script = "\n".join(read(f"{name}.js") for name in SCRIPTS)
    style = f"<style>\n{read('style.css')}</style>"
    page = read("page.html").replace("<style></style>", style)
    return page.replace("<script></script>", f"<script>\n{script}</script>")


def policy(text: str) -> str:
    """A Content-Security-Policy that allows the page's own style and script by their digests, and
    requests to its own server; nothing else.
    """
    rules = []
    for tag in ("style", "script"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in found]
        rules.append(f"{tag}-src " + " ".join(f"'sha256-{digest}'" for digest in digests))
    return "; ".join(
        [
            "default-src 'none'",
            *rules,
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ]
    )


TEXT = joined(Path(__file__).parent)
HEADERS = {
    "Content-Security-Policy": policy(TEXT),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",  # a browser would look up the hosts of an answer's links
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page."""
    return HTMLResponse(TEXT, headers=HEADERS)
