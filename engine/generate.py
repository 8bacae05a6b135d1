"""The one decode loop: a generator of small results with running statistics. Everything that
produces text consumes it.
"""

from dataclasses import asdict, dataclass, field

from engine.sampling import Sampler, SamplingParams
from engine.text.stop import StopScanner


@dataclass
class GenerationStats:
    """Running figures of one answer. Seconds and tokens; `cached_tokens` were in the bank already."""

    cached_tokens: int = 0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    sparse_steps: int = 0
    dense_steps: int = 0

    @property
    def prefill_rate(self):
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self):
        """Decode steps per second."""
        steps = self.sparse_steps + self.dense_steps
        return steps / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self):
        """Plain dict for JSON, rates included."""
        return asdict(self) | {"prefill_rate": self.prefill_rate, "decode_rate": self.decode_rate}


@dataclass(frozen=True)
class Piece:
    """One step of an answer. `text` may be empty while characters or a stop string are incomplete;
    the last has a finish_reason:

    "stop" (an end token, a stop token id or a stop string), "length" (max_tokens), "context" (the
    bank is full), "interrupted".
    """

    text: str
    token_id: int | None
    logprob: float | None
    top_logprobs: tuple
    finish_reason: str | None
    stats: GenerationStats


@dataclass
class Completion:
    """A whole answer: its text, the token ids that were sampled, why it ended, and the figures."""

    text: str
    token_ids: list
    finish_reason: str
    stats: GenerationStats
    logprobs: list = field(default_factory=list)

    @classmethod
    def join(cls, pieces):
        """Collect an iterator of Piece."""
        text, ids, logprobs, last = [], [], [], None
        for last in pieces:
            text.append(last.text)
            if last.token_id is not None:
                ids.append(last.token_id)
                if last.logprob is not None:
                    logprobs.append((last.logprob, last.top_logprobs))
        return cls("".join(text), ids, last.finish_reason, last.stats, logprobs)


def generate(session, token_ids, params=None, progress=None, should_stop=None):
    """Prefill `token_ids` (may be empty where the session has logits), then sample and decode until
    something ends it.

    Yields Piece. should_stop() -> bool is asked before every step. Every sampled token that is fed
    lies in the session; the last sampled one is fed too unless it ended the answer at a full bank,
    so that a next turn only appends.
    """
    params = params or SamplingParams()
    llm = session.llm
    with llm.busy():
        stats = GenerationStats(cached_tokens=len(session), prompt_tokens=len(token_ids))
        before = session.stats.to_dict()
        if token_ids:
            session.prefill(token_ids, progress)
        elif session.last_logits is None:
            session.refresh_logits()
        stats.prefill_seconds = session.stats.prefill_seconds - before["prefill_seconds"]
        sampler = Sampler(params, llm.config.vocab_size, session.ids)
        yield from _loop(session, params, sampler, stats, should_stop)


def _loop(session, params, sampler, stats, should_stop):
    llm = session.llm
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(llm.end_token_ids))
    words, scanner = (
        llm.tokenizer.stream(session.ids) if llm.tokenizer else None,
        StopScanner(params.stop),
    )
    start = session.stats.to_dict()
    while True:
        if should_stop is not None and should_stop():
            yield _last(words, scanner, "interrupted", stats)
            return
        token, logprob, top = sampler.sample(session.last_logits)
        if token in ends:
            _feed(session, token)
            yield _last(words, scanner, "stop", stats, token, logprob, top)
            return
        stats.new_tokens += 1
        shown = scanner.push(words.push(token) if words else "")
        reason = (
            "stop" if scanner.found else "length" if stats.new_tokens >= params.max_tokens else None
        )
        if len(session) >= session.capacity:
            reason = reason or "context"
        else:
            _feed(session, token)
        _count(session, start, stats)
        if reason is None:
            yield Piece(shown, token, logprob, top, None, stats)
            continue
        shown += _rest(words, scanner)
        yield Piece(shown, token, logprob, top, "stop" if scanner.found else reason, stats)
        return


def _feed(session, token):
    if len(session) < session.capacity:
        session.decode(token)


def _count(session, start, stats):
    now = session.stats
    stats.decode_seconds = now.decode_seconds - start["decode_seconds"]
    stats.sparse_steps = now.sparse_steps - start["sparse_steps"]
    stats.dense_steps = now.dense_steps - start["dense_steps"]


def _rest(words, scanner):
    """Text still held back at the end of an answer; may complete a stop string, which
    `scanner.found` tells.
    """
    shown = scanner.push(words.flush() if words else "")
    return shown if scanner.found else shown + scanner.flush()


def _last(words, scanner, reason, stats, token=None, logprob=None, top=()):
    return Piece(_rest(words, scanner), token, logprob, top, reason, stats)
