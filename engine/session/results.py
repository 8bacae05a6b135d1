"""The parts of an answer as callers get them: pieces, the completion, its figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.runner.state import SessionStats


@dataclass
class GenerationStats:
    """Running figures of one answer: seconds and tokens. cached_tokens: in the bank before.

    decode_seconds are those of steps that have ended: on a GPU all but the newest while an answer
    is being written, all of them in its last piece. cycles, drafted, accepted: of exact mode;
    speedup: over full attention, by counted bytes (0: not in exact mode).
    """

    cached_tokens: int = 0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    sparse_steps: int = 0
    dense_steps: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    speedup: float = 0.0

    def count(self, now: SessionStats, start: SessionStats) -> None:
        """Take the figures that a session counted since `start`, the beginning of an answer."""
        self.decode_seconds = now.decode_seconds - start.decode_seconds
        self.sparse_steps = now.sparse_steps - start.sparse_steps
        self.dense_steps = now.dense_steps - start.dense_steps
        self.cycles = now.cycles - start.cycles
        self.drafted = now.drafted - start.drafted
        self.accepted = now.accepted - start.accepted
        cost = now.cost_exact - start.cost_exact
        self.speedup = (now.cost_full - start.cost_full) / cost if cost else 0.0

    def took(self, seconds: float) -> None:
        """Note the seconds of the steps that have ended."""
        self.decode_seconds = seconds

    def counted_token(self) -> None:
        """Count a token that was written."""
        self.new_tokens += 1

    def read_in(self, seconds: float) -> None:
        """Note the seconds that the prompt took."""
        self.prefill_seconds = seconds

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Decode steps per second."""
        steps = self.sparse_steps + self.dense_steps
        return steps / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON, rates included."""
        return asdict(self) | {"prefill_rate": self.prefill_rate, "decode_rate": self.decode_rate}


@dataclass(frozen=True)
class Piece:
    """One step of an answer. `text` may be empty while a character or a stop string is incomplete.

    Only the last piece has a finish_reason: "stop" (an end token, a stop token id or a stop
    string), "length" (max_tokens), "context" (the bank is full) or "interrupted".
    """

    text: str
    token_id: int | None
    logprob: float | None
    top_logprobs: Sequence[tuple[int, float]]
    finish_reason: str | None
    stats: GenerationStats


@dataclass(frozen=True)
class DecodeRequest:
    """Asks for the decode step of `token`. None: the argmax of the logits, chosen by `step`."""

    token: int | None


@dataclass
class Completion:
    """A whole answer: its text, the token ids that were sampled, why it ended, and the figures."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[tuple] = field(default_factory=list)

    @classmethod
    def join(cls, pieces: Iterable[Piece]) -> Completion:
        """Collect an iterator of Piece."""
        text: list[str] = []
        ids: list[int] = []
        logprobs: list[tuple] = []
        last: Piece | None = None
        for last in pieces:
            text.append(last.text)
            if last.token_id is not None:
                ids.append(last.token_id)
                if last.logprob is not None:
                    logprobs.append((last.logprob, last.top_logprobs))
        assert last is not None and last.finish_reason is not None, "an answer has a last piece"
        return cls("".join(text), ids, last.finish_reason, last.stats, logprobs)
