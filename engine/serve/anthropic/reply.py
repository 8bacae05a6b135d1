"""What a client of /v1/messages gets back, whole and as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from engine.serve.anthropic.request import error_body
from engine.serve.errors import ApiError
from engine.serve.openai.answers import Answers
from engine.serve.openai.replies import Line
from engine.serve.request.calls.scanner import Call
from engine.serve.request.thoughts import Thought
from engine.serve.worker.worker import Wrote
from engine.text.tokenizer import Tokenizer

SIGNATURE = "unsigned"  # clients want one in a block of thinking, and send it back


class MessagesReply:
    """One message. stops, ends: the request's stop sequences, and the ids that end an answer."""

    def __init__(
        self,
        model: str,
        prompt: int,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        ends: Collection[int],
        answers: Answers,
    ) -> None:
        self.prompt, self.cached, self.written = prompt, 0, 0
        self.answers = answers
        self._model, self._tokenizer = model, tokenizer
        self._stops, self._ends = stops, frozenset(ends)
        self._id = "msg_" + secrets.token_hex(12)
        self._ids: list[int] = []
        self._blocks = 0  # content blocks begun
        self._open = ""  # the type of the last, where it goes on

    def found(self, tokens: int) -> None:
        """Note how many tokens of the prompt were held before."""
        self.cached = tokens

    def count(self, event: Wrote) -> None:
        """Add a step to the usage."""
        self.written += event.token_id is not None
        if event.token_id is not None:
            self._ids.append(event.token_id)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.written,
            **self.answers.forgotten(self.prompt + self.written),
        }

    def _stopped(self, event: Wrote) -> dict[str, Any]:
        """stop_reason and stop_sequence."""
        reason = self.answers.finish(0, event.finish or "length")
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if event.token_id in self._ends:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        text = self._tokenizer.decode(self._ids)
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if not found:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        return {"stop_reason": "stop_sequence", "stop_sequence": min(found)[1]}

    def whole(self, events: Iterable[Wrote], choices: int) -> dict[str, Any]:
        """The reply of all events."""
        content: list[dict[str, Any]] = []
        last = None
        for last in events:
            for part in self.answers.parts(last):
                if isinstance(part, Call):
                    content.append(_tool_use(part, json.loads(part.arguments)))
                elif isinstance(part, Thought) and content and content[-1]["type"] == "thinking":
                    content[-1]["thinking"] += part.text
                elif isinstance(part, Thought):
                    content.append(_thinking(part.text, SIGNATURE))
                elif content and content[-1]["type"] == "text":
                    content[-1]["text"] += part
                else:
                    content.append({"type": "text", "text": part})
        stopped = self._stopped(last) if last is not None else {}
        return self._message(content) | stopped

    # ---------------------------------------------------------------- events

    def begin(self) -> list[Line]:
        """When the prompt begins to be read."""
        return [_event("message_start", message=self._message([]))]

    def quiet(self) -> list[Line]:
        """While the prompt is read."""
        return [_event("ping")]

    def step(self, event: Wrote) -> list[Line]:
        """The events of one step."""
        found: list[Line] = []
        for part in self.answers.parts(event):
            if isinstance(part, Call):
                found += [*self._ended(), self._block(_tool_use(part, {}))]
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
                found += [self._delta(delta), self._stop_block()]
                continue
            thinks = isinstance(part, Thought)
            kind = "thinking" if thinks else "text"
            if self._open != kind:
                found += self._ended()
                begun = _thinking("", "") if thinks else {"type": "text", "text": ""}
                found.append(self._block(begun))
                self._open = kind
            text = part.text if isinstance(part, Thought) else part
            found.append(self._delta({"type": f"{kind}_delta", kind: text}))
        if event.finish:
            found += self._ended()
            usage = {"output_tokens": self.written}
            usage |= self.answers.forgotten(self.prompt + self.written)
            found.append(_event("message_delta", delta=self._stopped(event), usage=usage))
        return found

    def end(self) -> list[Line]:
        """After the last step."""
        return [_event("message_stop")]

    def failed(self, error: ApiError) -> Line:
        """What cut the answer."""
        return "error", error_body(error)

    def _block(self, block: dict[str, Any]) -> Line:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> Line:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop_block(self) -> Line:
        return _event("content_block_stop", index=self._blocks - 1)

    def _ended(self) -> list[Line]:
        """The end of a block that goes on."""
        kind, self._open = self._open, ""
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})]
        return [*(signed if kind == "thinking" else []), self._stop_block()] if kind else []


def _event(name: str, **fields: Any) -> Line:
    return name, {"type": name, **fields}


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call: Call, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
