"""POST /v1/text: the text of a document in another format, for the page. The same bytes get the
same text and the same words as in the chat.
"""

from __future__ import annotations

import base64
import binascii

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.base.errors import EngineError
from engine.serve.errors import ApiError
from engine.serve.guards import Guard
from engine.serve.request.values import refuse, text_of
from engine.serve.texts import SIZE, Texts
from engine.terminal.documents import longest_document
from engine.text.boundary import one_line
from engine.text.papers.papers import Paper, paper

MOST = 32 << 20  # bytes of a body: a file of 24 MB in base64
SECONDS = 60.0  # of a conversion
WAITING = 4  # documents that may wait: one of more than 16 KB is converted at a time
NAME = 100  # characters of a name


class Documents:
    """Converts documents beside the event loop and beside the texts of others."""

    def __init__(self, guard: Guard, max_context: int) -> None:
        self._guard, self._longest = guard, longest_document(max_context)
        self._texts = Texts(WAITING)

    async def text(self, request: Request) -> Response:
        """{"name", "data": base64} to {"text", "note"}; note: what it was, "" for plain text."""
        body = await self._guard.body(request, MOST)
        name, data = text_of(body.get("name"), "name"), body.get("data")
        if not isinstance(data, str):
            raise refuse("data", "something else", "the document's bytes in base64")

        def call() -> Paper:
            given = base64.b64decode(data, validate=True)
            return paper(given, one_line(name)[:NAME], self._longest, SECONDS)

        size = request.scope.get(SIZE, 0)
        try:
            found = await self._texts.run(size, request.is_disconnected, call)
        except binascii.Error:
            raise refuse("data", "something else", "the document's bytes in base64") from None
        except EngineError as error:
            raise ApiError(400, str(error), "data", "no_text") from None
        return JSONResponse({"text": found.text, "note": found.note})
