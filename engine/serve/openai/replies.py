"""What clients get back from chat/completions and completions, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from engine.forward.scores import PromptScores
from engine.serve.errors import ApiError
from engine.serve.openai.answers import Answers
from engine.serve.request.calls.scanner import Call
from engine.serve.request.prompts import Prompt
from engine.serve.request.thoughts import Thought
from engine.serve.worker.worker import Wrote
from engine.text.tokenizer import Tokenizer

# an event of a stream: its name, if it has one, and its data
Line = tuple[str | None, Any]


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class Reply:
    """One answer's shape. chat: chat/completions, else completions, each of whose choices begins
    with the text of `echoed`, and its log probabilities with `scores`.
    """

    def __init__(
        self,
        model: str,
        chat: bool,
        prompt: int,
        logprobs: int | None,
        tokenizer: Tokenizer,
        answers: Answers,
        include_usage: bool = False,
        usage_always: bool = False,
        echoed: Prompt | None = None,
        scores: PromptScores | None = None,
    ) -> None:
        self._include_usage, self._usage_always = include_usage, usage_always
        self._echoed = echoed.text if echoed else ""
        self._scored_prompt = (echoed, scores) if echoed and scores else None
        self._spoken: set[int] = set()  # choices that have begun
        self.chat, self.prompt, self.logprobs, self.tokenizer = chat, prompt, logprobs, tokenizer
        self.answers = answers
        self.cached = self.written = 0
        self._model, self._made = model, int(time.time())
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._offsets: dict[int, int] = {}  # choice -> characters so far

    def usage(self) -> dict[str, Any]:
        """Tokens: of the prompt, those that were held, those sampled."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.answers.thinking},
            **self.answers.forgotten(self.prompt + self.written),
        }

    def head(self, chunk: bool) -> dict[str, Any]:
        """The fields of every object."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._made, "model": self._model}

    def found(self, tokens: int) -> None:
        """Note how many tokens of the prompt were held before."""
        self.cached = tokens

    def count(self, event: Wrote) -> None:
        """Add a step to the usage."""
        self.written += event.token_id is not None

    # ---------------------------------------------------------------- whole

    def whole(self, events: Iterable[Wrote], choices: int) -> dict[str, Any]:
        """The reply of all events of an answer."""
        steps: list[list[Wrote]] = [[] for _ in range(choices)]
        for event in events:
            steps[event.choice].append(event)
        found = []
        for index, mine in enumerate(steps):
            parts = [part for event in mine for part in self.answers.parts(event)]
            text = "".join(part for part in parts if isinstance(part, str))
            finish = next((e.finish for e in reversed(mine) if e.finish), "length")
            choice: dict[str, Any] = {"index": index}
            choice["finish_reason"] = self.answers.finish(index, finish)
            if self.chat:
                message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
                if thought := "".join(part.text for part in parts if isinstance(part, Thought)):
                    message["reasoning_content"] = thought
                if calls := [call for call in parts if isinstance(call, Call)]:
                    message["content"] = text or None
                    message["tool_calls"] = [_call(call) for call in calls]
                choice["message"] = message
            else:
                choice["text"] = self._echoed + text
            choice["logprobs"] = self._logprobs(mine)
            if self._scored_prompt is not None:
                choice["logprobs"] = self._with_prompt(choice["logprobs"], *self._scored_prompt)
            for event in mine:
                if event.evidence is not None:
                    choice["omnikv"] = event.evidence
            found.append(choice)
        return {**self.head(False), "choices": found, "usage": self.usage()}

    # ---------------------------------------------------------------- chunks

    def begin(self) -> list[Line]:
        """When the prompt begins to be read: nothing."""
        return []

    def quiet(self) -> list[Line]:
        """While the prompt is read: nothing."""
        return []

    def end(self) -> list[Line]:
        """After the last step: the usage where it was asked for, and the end mark."""
        done: list[Line] = [(None, "[DONE]")]
        if not self._include_usage:
            return done
        return [(None, {**self.head(True), "choices": [], "usage": self.usage()}), *done]

    def failed(self, error: ApiError) -> Line:
        """What cut the answer."""
        return None, error.body()

    def step(self, event: Wrote) -> list[Line]:
        """The chunks of one step; before a choice's first, in a chat whose turn it is, in a
        completion what is echoed.
        """
        found = []
        if event.choice not in self._spoken:
            self._spoken.add(event.choice)
            opening = {"role": "assistant", "content": ""} if self.chat else self._echoed
            if opening:
                found.append(self._chunk(event.choice, opening, None, None))
        return [(None, chunk) for chunk in [*found, *self._chunks(event)]]

    def _chunks(self, event: Wrote) -> list[dict[str, Any]]:
        scores, found = self._logprobs([event]), list[dict[str, Any]]()
        for part in self.answers.parts(event):
            if isinstance(part, Call):
                number = self.answers.called[event.choice].index(part)
                delta: Any = {"tool_calls": [{"index": number, **_call(part)}]}
            elif isinstance(part, Thought):
                delta = {"reasoning_content": part.text}
            else:
                delta = {"content": part} if self.chat else part
                self._offsets[event.choice] = self._offsets.get(event.choice, 0) + len(part)
            found.append(self._chunk(event.choice, delta, None, scores))
            scores = None
        if scores or (event.reads and not found):
            delta = {"content": ""} if self.chat else ""
            found.append(self._chunk(event.choice, delta, None, scores))
        if event.reads:
            found[0]["choices"][0]["omnikv"] = {"reads": event.reads}
        if event.finish:
            finish = self.answers.finish(event.choice, event.finish)
            last = self._chunk(event.choice, {} if self.chat else "", finish, None)
            if event.evidence is not None:
                last["choices"][0]["omnikv"] = event.evidence
            found.append(last)
        return found

    def _chunk(
        self, index: int, delta: Any, finish: str | None, scores: dict[str, Any] | None
    ) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": finish, "logprobs": scores}
        choice["delta" if self.chat else "text"] = delta
        usage = {"usage": self.usage()} if self._usage_always else {}
        return {**self.head(True), "choices": [choice], **usage}

    # ---------------------------------------------------------------- log probabilities

    def _logprobs(self, events: list[Wrote]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        scored = [e for e in events if e.token_id is not None and e.logprob is not None]
        if not scored:
            return None
        if self.chat:
            return {"content": [self._scored(event) for event in scored], "refusal": None}
        offsets, at = [], self._offsets.get(scored[0].choice, len(self._echoed))
        for event in scored:
            offsets.append(at)
            at += len(event.text)
        return {
            "tokens": [self._spelled(e.token_id) for e in scored],
            "token_logprobs": [e.logprob for e in scored],
            "top_logprobs": [
                {self._spelled(i): p for i, p in e.top[: self.logprobs]} for e in scored
            ],
            "text_offset": offsets,
        }

    def _with_prompt(
        self, written: dict[str, Any] | None, prompt: Prompt, scores: PromptScores
    ) -> dict[str, Any]:
        """Log probabilities of a prompt, and behind them those of what was written."""
        assert self.logprobs is not None
        every = [{self._spelled(i): p for i, p in top} for top in scores.top_logprobs]
        found: dict[str, list[Any]] = {
            "tokens": [self._spelled(token_id) for token_id in prompt.ids],
            "token_logprobs": list(scores.logprobs),
            "top_logprobs": [None, *every[1:]],
            "text_offset": [0, *prompt.ends[:-1]],
        }
        return {name: values + (written or {}).get(name, []) for name, values in found.items()}

    def _scored(self, event: Wrote) -> dict[str, Any]:
        top = [self._named(i, p) for i, p in event.top[: self.logprobs]]
        return {**self._named(event.token_id, event.logprob), "top_logprobs": top}

    def _named(self, token_id: int | None, logprob: float | None) -> dict[str, Any]:
        text = self._spelled(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _spelled(self, token_id: int | None) -> str:
        assert token_id is not None
        return self.tokenizer.backend.decode([token_id], skip_special_tokens=False)
