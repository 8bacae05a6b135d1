"""Sessions whose method has given rows up: what they must do anew to go back, or to begin with a
method that counts attention.

A bank that keeps everything forgets its last tokens by a number; a store that has evicted on the
way does not. So the way is gone again, from the last prompt's end that is kept: exact, at the cost
of the steps since.
"""

from dataclasses import dataclass, field, replace

import torch

from engine.prefill import run_chunk


@dataclass
class Mark:
    """The end of a prefill: the bank's length before it and then, and what the method fixed for the
    answer that follows.

    logits: of its last token; queries: the newest raw queries then (QueryRing.newest), kept where
    they could not be recomputed. open: the prompt goes on in the next prefill.
    """

    start: int
    length: int
    state: object = field(repr=False, default=None)
    logits: object = field(repr=False, default=None)
    queries: object = field(repr=False, default=None)
    open: bool = False

    @property
    def nbytes(self):
        """Bytes of the tensors that are kept for going back."""

        def size(thing):
            if isinstance(thing, torch.Tensor):
                return thing.numel() * thing.element_size()
            return sum(map(size, thing)) if isinstance(thing, (list, tuple)) else 0

        return size([self.state, self.queries])


def go_again(session, marks, fresh, n):
    """Truncate an evicting session to n tokens. marks: ends of its prompts so far; fresh: the
    runtime's state before the first.

    The session is set back to the last mark at or before n, and its tokens from there on are
    decoded, or read where they were a prompt, once more. Returns (marks kept, a call that does it):
    the session stores the first before it makes the second.
    """
    kept = [m for m in marks if m.length <= n]
    while kept and kept[-1].open and 0 < n - kept[-1].length < session.method.last_part:
        # too little of this prompt is left for a part of its own
        kept.pop()
    cut = next(iter(marks[len(kept) :]), None)
    mark, ids, stats = (
        kept[-1] if kept else Mark(0, 0, fresh),
        session.ids[:n],
        replace(session.counters),
    )
    prompt = cut.start if cut is not None and cut.start < n else n

    def again():
        """Set the session back, then forth."""
        ring = session.query_ring
        del session.ids[mark.length :]
        session.bank.rewind(mark.length)
        ring.truncated(mark.length)
        if mark.queries is not None:
            ring.commit(mark.queries, mark.length)
            ring.hold(mark.length - mark.queries.shape[2], mark.length)
        with torch.inference_mode():
            session.runtime.restore(mark.state, mark.length)
        session.last_logits = mark.logits
        for token in ids[mark.length : prompt]:
            session.decode(token)
        if prompt < n:
            session.prefill(ids[prompt:])
        # what was done again was counted before
        session.counters.__dict__.update(stats.__dict__)

    return kept, again


def look_again(session):
    """Run the queries of all tokens over the bank once more, for a method that sums what they
    attend to; rows stay as they are.
    """
    n, llm = len(session), session.llm
    session.runtime.begin_prefill(0, n)
    with torch.inference_mode():
        for first in range(0, n, llm.chunk):
            last = min(n, first + llm.chunk)
            tokens = torch.tensor(
                [session.ids[first:last]], dtype=torch.int64, device=llm.model.device
            )
            run_chunk(
                llm.model, llm.rotary, session.runtime, session.bank, tokens, first, n, write=False
            )
            session.runtime.advance(last - first)
