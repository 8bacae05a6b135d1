"""One text under every column: its last positions decoded step by step, and full attention's own
answer after the same head, each step compared with full attention's.

The head is read once, by full attention, for methods that leave prefill alone; the others read it
themselves. Once more with the head's last tokens, the question, read by the method's own steps: the
same positions are scored, over rows that full attention has not made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from engine import LLM, Full
from engine.session.session import Session
from tools.common.documents import Text
from tools.compare.mass import BoundWatch
from tools.fidelity.columns import Column

Record = dict[str, Any]


def per_step(sums: dict[int, float], steps: int) -> dict[str, float]:
    """{layer: the mean over steps}."""
    return {str(layer): round(total / steps, 4) for layer, total in sums.items()}


@dataclass
class Stream:
    """Tokens to feed after the head and full attention's log-probabilities after each: float64
    [vocab].
    """

    tokens: list[int]
    log_probs: list[torch.Tensor] = field(default_factory=list)

    def add(self, logits: torch.Tensor) -> None:
        """Keep full attention's decision."""
        self.log_probs.append(torch.log_softmax(logits.double(), -1).cpu())

    def compare(self, at: int, logits: torch.Tensor) -> tuple[float, bool]:
        """(KL(full || method) in nats, whether both say the same token) after token `at`."""
        p, q = self.log_probs[at], torch.log_softmax(logits.double(), -1).cpu()
        return max(0.0, float((p.exp() * (p - q)).sum())), bool(p.argmax() == q.argmax())


def decoded(session: Session, stream: Stream, sparse: bool, mass: bool = False) -> dict[str, Any]:
    """Feed a stream to a session that holds the head; returns a record's figures.

    kl: nats per position; same: "1" where the top-1 tokens agree, else "0"; bytes: keys and values
    read per step, in all layers; choosing: bytes read beside them to choose; rows: tokens read per
    step in a layer that reads a part, recent ones included; chosen: tokens that it chooses or
    keeps; mass: kept per sparse layer, or None; most: what as many rows could keep of the same
    attention.
    Raises AssertionError where `sparse` and a step was not.
    """
    before, kl, same, choosing = session.stats, [], "", 0
    watch = BoundWatch() if mass else None
    session.watch_with(watch)
    try:
        for at, token in enumerate(stream.tokens):
            far, equal = stream.compare(at, session.decode(token))
            kl.append(float(f"{far:.4g}"))
            same += str(int(equal))
            choosing += session.runtime.choosing_bytes(len(session)) if sparse else 0
    finally:
        session.watch_with(None)
    after, steps = session.stats, len(stream.tokens)
    if sparse and after.sparse_steps - before.sparse_steps != steps:
        raise AssertionError(
            f"{after.sparse_steps - before.sparse_steps} of {steps} decode steps were sparse"
        )
    partial = len(session.plan.partial_layers)
    read = after.bytes_read_sparse + after.bytes_read_dense
    read -= before.bytes_read_sparse + before.bytes_read_dense
    rows = after.rows_read_sparse - before.rows_read_sparse
    return {
        "kl": kl,
        "same": same,
        "bytes": round(read / steps),
        "choosing": round(choosing / steps),
        "rows": round(rows / steps / partial, 1) if sparse and partial else None,
        "chosen": session.runtime.k,
        "mass": per_step(watch.sums, steps) if watch is not None and watch.sums else None,
        "most": per_step(watch.most, steps) if watch is not None and watch.most else None,
        "seconds": round(after.decode_seconds - before.decode_seconds, 3),
    }


class Followed:
    """One text at one length: the session that full attention has read the head into, and full
    attention's decisions. question: tokens at the head's end that a method's own steps read before
    the text is scored once more.
    """

    def __init__(
        self,
        llm: LLM,
        text: Text,
        positions: int,
        answer: int,
        mass: bool = False,
        question: int = 0,
    ):
        self.llm, self.text, self.mass, self.question = llm, text, mass, question
        self.head = list(text.ids[:-positions])
        self.capacity = len(self.head) + max(positions, answer)
        began = time.perf_counter()
        self.session = llm.session(Full(), max_context=self.capacity, offload="device")
        try:
            # in two parts: the second is read again after each column, to the same bits
            begin = len(self.head) - question
            for part in filter(None, (self.head[:begin], self.head[begin:])):
                self.session.prefill(part)
            self.streams = {"text": Stream(list(text.ids[-positions:]))}
            for token in self.streams["text"].tokens:
                self.streams["text"].add(self.session.decode(token))
            self.session.truncate(len(self.head))
            if answer:
                self.streams["answer"] = self._answered(answer)
        except BaseException:
            self.session.close()
            raise
        self.seconds = time.perf_counter() - began

    def _answered(self, most: int) -> Stream:
        """Full attention's greedy answer, up to its end token."""
        stream, logits = Stream([]), self.session.last_logits
        assert logits is not None
        while len(stream.tokens) < most:
            token = int(logits.argmax())
            if token in self.llm.end_token_ids:
                break
            stream.tokens.append(token)
            logits = self.session.decode(token)
            stream.add(logits)
        self.session.truncate(len(self.head))
        return stream

    def __enter__(self) -> Followed:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def records(self, column: Column) -> list[Record]:
        """One record per stream under a column."""
        method = column.method
        assert method is not None
        if column.entry.reads == "own":
            with self.llm.session(
                method, max_context=self.capacity, offload=column.entry.place
            ) as session:
                session.prefill(self.head)
                return self._all(session, column)
        try:
            if column.name != "full":
                self.session.set_method(method)
            return self._all(self.session, column)
        finally:
            # before the truncate: full attention has nothing to redo
            self.session.set_method(Full())
            self.session.truncate(len(self.head) - self.question)
            if self.question:
                self.session.prefill(self.head[-self.question :])

    def _all(self, session: Session, column: Column) -> list[Record]:
        found = []
        # the text last: where its record was written whole, the answer's was too
        for name, stream in reversed(self.streams.items()):
            if not stream.tokens:
                continue
            session.truncate(len(self.head))
            figures = decoded(session, stream, column.entry.sparse, self.mass)
            found.append(self._record(name, column, figures))
        if self.question:
            session.truncate(len(self.head) - self.question)
            for token in self.head[-self.question :]:
                session.decode(token)
            figures = decoded(session, self.streams["text"], column.entry.sparse, self.mass)
            found.insert(0, self._record("question", column, figures))
        return found

    def _record(self, stream: str, column: Column, figures: dict[str, Any]) -> Record:
        return {"stream": stream, **about(column, self.text, len(self.text.ids)), **figures}


def about(column: Column, text: Text, length: int) -> Record:
    """The fields of a record that say what was measured on what."""
    return {
        "column": column.label,
        "name": column.name,
        "budget": column.budget,
        "filters": column.filters,
        "wait": column.wait,
        "text": text.name,
        "kind": text.kind,
        "length": length,
    }


def agreement(record: Record) -> float:
    """Share of a record's positions at which both say the same token."""
    return record["same"].count("1") / len(record["same"])


def until_difference(record: Record) -> int:
    """Tokens that a greedy answer has in common with full attention's, after its first: as many as
    agree from the start, since up to there both have the same history.
    """
    same = record["same"]
    return len(same) - len(same.lstrip("1"))


def key_of(record: Record) -> tuple[Any, ...]:
    """Equal for two records of the same column about the same stream or question."""
    return tuple(record.get(n) for n in ("stream", "column", "text", "length", "question"))
