"""What a client of /v1/responses gets back, whole and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from engine.serve.errors import ApiError
from engine.serve.openai.answers import Answers
from engine.serve.openai.replies import Line
from engine.serve.request.calls.scanner import Call
from engine.serve.request.thoughts import Thought
from engine.serve.responses.request import INCLUDED, sealed
from engine.serve.worker.worker import Wrote

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # of an item's content
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")


class ResponsesReply:
    """One response. body: the request, of which the reply repeats some fields."""

    def __init__(
        self,
        model: str,
        prompt: int,
        body: Mapping[str, Any],
        answers: Answers,
    ) -> None:
        self.prompt, self.cached, self.written = prompt, 0, 0
        self.answers = answers
        self._model, self._body, self._made = model, body, int(time.time())
        self._id = "resp_" + secrets.token_hex(12)
        self._items: list[dict[str, Any]] = []
        self._open = ""  # the type of the last, where it goes on
        self._number = 0
        self._reason = "length"

    def found(self, tokens: int) -> None:
        """Note how many tokens of the prompt were held before."""
        self.cached = tokens

    def count(self, event: Wrote) -> None:
        """Add a step to the usage."""
        self.written += event.token_id is not None

    def _response(self, status: str) -> dict[str, Any]:
        done = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._made,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._model,
            **{name: self._body.get(name) for name in ECHOED},
            "output": list(self._items) if done else [],
            "parallel_tool_calls": self._body.get("parallel_tool_calls", True),
            "tool_choice": self._body.get("tool_choice", "auto"),
            "tools": self._body.get("tools") or [],
            "previous_response_id": None,
            "store": False,
            "usage": self._usage() if done else None,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.written,
            "output_tokens_details": {"reasoning_tokens": self.answers.thinking},
            "total_tokens": self.prompt + self.written,
            **self.answers.forgotten(self.prompt + self.written),
        }

    def whole(self, events: Iterable[Wrote], choices: int) -> dict[str, Any]:
        """The reply of all events."""
        for event in events:
            self.step(event)
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    # ---------------------------------------------------------------- events

    def begin(self) -> list[Line]:
        """When the prompt begins to be read."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def quiet(self) -> list[Line]:
        """While the prompt is read."""
        return [self._event("keepalive")]

    def step(self, event: Wrote) -> list[Line]:
        """The events of one step."""
        found: list[Line] = []
        for part in self.answers.parts(event):
            if isinstance(part, Call):
                found += [*self._ended(), *self._called(part)]
                continue
            thinks = isinstance(part, Thought)
            if self._open != (kind := "reasoning" if thinks else "message"):
                found += [*self._ended(), *self._begun(kind)]
            text = part.text if isinstance(part, Thought) else part
            self._items[-1]["content"][0]["text"] += text
            event_of = f"response.{PARTS[kind]}.delta"
            found.append(self._event(event_of, **self._part(), delta=text))
        if event.finish:
            self._reason = self.answers.finish(0, event.finish)
            found += self._ended()
        return found

    def end(self) -> list[Line]:
        """After the last step."""
        status = self._status()
        return [self._event(f"response.{status}", response=self._response(status))]

    def failed(self, error: ApiError) -> Line:
        """What cut the answer."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> Line:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **fields}

    def _part(self) -> dict[str, Any]:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return {**where, "content_index": 0}

    def _begun(self, kind: str) -> list[Line]:
        """Begin a message or a thought."""
        name = "msg_" if kind == "message" else "rs_"
        item = dict[str, Any](id=name + secrets.token_hex(12), type=kind)
        if kind == "message":
            item |= {"status": "in_progress", "role": "assistant"}
        else:
            item["summary"] = []
        self._items.append({**item, "content": []})
        self._open = kind
        added = self._event(
            "response.output_item.added",
            output_index=len(self._items) - 1,
            item=dict(self._items[-1], content=[]),
        )
        text: dict[str, Any] = {"type": PARTS[kind], "text": ""}
        if kind == "message":
            text["annotations"] = []
        self._items[-1]["content"].append(text)
        part = self._event("response.content_part.added", **self._part(), part=dict(text))
        return [added, part]

    def _ended(self) -> list[Line]:
        """The end of a message or a thought that goes on."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item = self._items[-1]
        text = item["content"][0]
        if kind == "message":
            item["status"] = "completed"
        elif INCLUDED in (self._body.get("include") or []):
            item["encrypted_content"] = sealed(text["text"])
        where = self._part()
        return [
            self._event(f"response.{PARTS[kind]}.done", **where, text=text["text"]),
            self._event("response.content_part.done", **where, part=text),
            self._event("response.output_item.done", output_index=where["output_index"], item=item),
        ]

    def _called(self, call: Call) -> list[Line]:
        item = {
            "id": "fc_" + secrets.token_hex(12),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        index = len(self._items)
        where = {"item_id": item["id"], "output_index": index}
        added = self._event("response.output_item.added", output_index=index, item=dict(item))
        item |= {"status": "completed", "arguments": call.arguments}
        self._items.append(item)
        kind = "response.function_call_arguments"
        return [
            added,
            self._event(f"{kind}.delta", **where, delta=call.arguments),
            self._event(f"{kind}.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]
