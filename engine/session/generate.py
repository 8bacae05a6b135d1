"""The one decode loop: a generator of small results with running statistics. Everything that
produces text consumes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from engine.base.checks import callables, found
from engine.base.errors import SessionClosed, SettingError
from engine.plan.prefill_time import PrefillProgress
from engine.runner.extend import decode, prefill, with_logits
from engine.runner.state import SessionState
from engine.runner.step import step
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.session.results import DecodeRequest, GenerationStats, Piece
from engine.text.detokenizer import ByteStream, FallbackStream
from engine.text.stop import StopScanner

Detokenizer = ByteStream | FallbackStream


def generate(
    session: SessionState,
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    progress: Callable[[PrefillProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Generator[Piece, None, None]:
    """Prefill `token_ids` (may be empty if the session holds tokens), then sample and decode until
    the answer ends. Any thread may ask for the next piece, one at a time.

    should_stop() is asked before every step. Every sampled token is decoded, the last one too
    unless the bank is full, so that the next turn only appends.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise SettingError(f"params: found {found(params)}, expected SamplingParams(...)")
    callables(progress=progress, should_stop=should_stop)
    request = session.loaded.request()
    pieces = _alone(session, _answer(session, token_ids, params, progress, should_stop))
    try:
        try:
            while True:
                with request.piece():
                    piece = next(pieces, None)
                if piece is None:
                    break
                # here nothing runs: the thread and its current device are the caller's own
                yield piece
        finally:
            pieces.close()
            request.end()
    finally:
        request.end()  # an interrupt may have met the first


def _alone(
    session: SessionState, parts: Generator[Piece | DecodeRequest, None, None]
) -> Generator[Piece, None, None]:
    """Yield the pieces of an answer; run each decode step for this session by itself."""
    with closing(parts):
        for part in parts:
            if isinstance(part, Piece):
                yield part
            elif part.token is None:
                step(session, None)
            else:
                decode(session, part.token)


def _answer(
    session: SessionState,
    token_ids: Sequence[int],
    params: SamplingParams,
    progress: Callable[[PrefillProgress], None] | None,
    should_stop: Callable[[], bool] | None,
) -> Generator[Piece | DecodeRequest, None, None]:
    stats = GenerationStats(cached_tokens=len(session), prompt_tokens=len(token_ids))
    before = replace(session.counters)
    if token_ids:
        prefill(session, token_ids, progress)
    elif session.last_logits is None:
        with_logits(session, progress)
    stats.read_in(session.counters.prefill_seconds - before.prefill_seconds)
    yield from written(session, params, stats, should_stop)


def written(
    session: SessionState,
    params: SamplingParams,
    stats: GenerationStats,
    should_stop: Callable[[], bool] | None = None,
) -> Generator[Piece | DecodeRequest, None, None]:
    """Generate an answer without running steps. Yields Pieces and DecodeRequests; the driver must
    decode the requested token before resuming the generator.
    """
    loaded = session.loaded
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(loaded.end_token_ids))
    sampler = Sampler(params, loaded.config.vocab_size, session.ids, ends)
    session.write_with(sampler)
    try:
        yield from _loop(session, params, sampler, ends, stats, should_stop)
    finally:
        session.write_with(None)


def _loop(
    session: SessionState,
    params: SamplingParams,
    sampler: Sampler,
    ends: set[int],
    stats: GenerationStats,
    should_stop: Callable[[], bool] | None,
) -> Iterator[Piece | DecodeRequest]:
    loaded = session.loaded
    words = loaded.tokenizer.stream(session.ids) if loaded.tokenizer else None
    scanner = StopScanner(params.stop)
    start = replace(session.counters)
    while True:
        if should_stop is not None and should_stop():
            yield _last(words, scanner, "interrupted", stats)
            return
        if session.closed:
            raise SessionClosed("this session was closed while an answer was being generated")
        if session.last_logits is None:
            raise SettingError(
                "generate: the session was truncated while an answer was being generated; close "
                "the generator first"
            )
        logprob: float | None = None
        top: Sequence[tuple[int, float]] = ()
        ahead = sampler.greedy and runs_ahead(session)
        if ahead:  # the token that ends the answer is decoded too, so no step is superfluous
            yield DecodeRequest(None)
            sampler.took(token := session.ids[-1])
        else:
            token, logprob, top = sampler.sample(session.last_logits)
        session.take_time()  # the step before has ended: its token was read
        stats.took(session.counters.decode_seconds - start.decode_seconds)
        if token in ends:
            session.write_with(None)  # no token follows that could be drafted
            if not ahead and len(session) < session.limit:
                yield DecodeRequest(token)
            yield _last(words, scanner, "stop", stats, token, logprob, top)
            return
        stats.counted_token()
        shown = scanner.push(words.push(token) if words else "")
        reason = (
            "stop" if scanner.found else "length" if stats.new_tokens >= params.max_tokens else None
        )
        if reason is not None:
            session.write_with(None)
        if not ahead and len(session) >= session.limit:
            reason = reason or "context"
        elif not ahead:
            yield DecodeRequest(token)
        session.take_time(wait=reason is not None)
        stats.count(session.counters, start)
        if reason is None:
            yield Piece(shown, token, logprob, top, None, stats)
            continue
        shown += _rest(words, scanner)
        yield Piece(shown, token, logprob, top, "stop" if scanner.found else reason, stats)
        return


def runs_ahead(session: SessionState) -> bool:
    """Return whether `step(session, None)` is possible and is issued before the host knows its
    token.
    """
    n = len(session) + 1
    whole = session.history.pending is None and session.last_logits is not None
    return whole and n <= session.limit and session.runner.runs_ahead(n)


def _rest(words: Detokenizer | None, scanner: StopScanner) -> str:
    """Return the text still held back at the end of an answer. It may complete a stop string: see
    scanner.found.
    """
    shown = scanner.push(words.flush() if words else "")
    return shown if scanner.found else shown + scanner.flush()


def _last(
    words: Detokenizer | None,
    scanner: StopScanner,
    reason: str,
    stats: GenerationStats,
    token: int | None = None,
    logprob: float | None = None,
    top: Sequence[tuple[int, float]] = (),
) -> Piece:
    return Piece(_rest(words, scanner), token, logprob, top, reason, stats)
