"""Evidence returned with an answer: passages read, agreement with full attention. A request asks
for it with `"omnikv": {"sources": N, "check": N}`; with `"live": true` it also gets the passages of
each step while the answer is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.evidence.sources import Choices, Owners, counted, rank_passages, split_passages, untied
from engine.serve.errors import ApiError
from engine.serve.request.prompts import Prompt
from engine.serve.worker.counted import Figures
from engine.session.results import GenerationStats
from engine.session.session import Session

FIELDS = ("sources", "check", "method", "live", "figures", "progress")
MOST_SOURCES = 64  # passages
MOST_LIVE = 12  # passages of one step: some 300 bytes of a stream
MOST_CHECK = 32  # steps that run twice more each, while nobody else's do


# a passage of one step: its message, first character and the one behind the last, and its share
Read = tuple[int, int, int, float]


@dataclass(frozen=True)
class Wanted:
    """sources: most passages to name. check: steps to compare with full attention. 0: neither.
    method: sparse, full or exact; None: what the server runs. live: name the passages of every step
    too. figures: count what the steps read. progress: say often how much of the prompt is read.
    """

    sources: int = 0
    check: int = 0
    method: str | None = None
    live: bool = False
    figures: bool = False
    progress: bool = False

    @property
    def evidence(self) -> bool:
        """Whether anything is to be found out."""
        return bool(self.sources or self.check or self.figures)


class _Left(Exception):
    """Nobody waits for the check any more."""


@dataclass(frozen=True)
class Place:
    """Where a part of a message stands in the prompt: characters start to stop-1 of its text.

    offset: of the part in its message's content.
    """

    message: int
    start: int
    stop: int
    offset: int


def places(text: str, contents: Sequence[str]) -> list[Place]:
    """Where the messages' contents stand in the text that a chat template made of them, in order.

    A template may trim a content, or put a mark between its paragraphs: then each paragraph is
    looked for by itself. What is not found is left out.
    """
    found: list[Place] = []
    at = 0
    for number, content in enumerate(contents):
        behind = 0  # in the content
        whole = content.strip()
        for part in [whole] if text.find(whole, at) >= 0 else whole.split("\n\n"):
            part = part.strip()
            start = text.find(part, at) if part else -1
            if start < 0:
                continue
            at = start + len(part)
            offset = content.find(part, behind)
            behind = offset + len(part)
            found.append(Place(number, start, at, offset))
    return found


class Evidence:
    """Collects one answer's after the other. Used by the worker's thread."""

    def __init__(self, wanted: Wanted, prompt: Prompt, contents: Sequence[str]) -> None:
        self.wanted, self._prompt, self._contents = wanted, prompt, contents
        self._places = places(prompt.text, contents) if wanted.sources else []
        self._choices = Choices()
        self._figures: Figures | None = None
        if wanted.live:
            borders = [
                (place, *border)
                for place in self._places
                for border in split_passages(prompt.text, place.start, place.stop)
            ]
            self._live = [
                (
                    place.message,
                    place.offset + start - place.start,
                    place.offset + stop - place.start,
                )
                for place, start, stop in borders
            ]
            self._owners = Owners(prompt.ends, [(start, stop) for _, start, stop in borders])

    def begin(self, session: Session) -> None:
        """An answer begins."""
        self._figures = Figures(session) if self.wanted.figures else None

    def add(self, session: Session) -> list[Read]:
        """Note what the latest step chose. With `live`, the passages that it read most, best first;
        empty where it read everything.
        """
        if not self.wanted.sources:
            return []
        chosen = counted(session.selections, session.selection_scores)
        self._choices.take(chosen)
        if not self.wanted.live or not chosen:
            return []
        best = self._owners.best(chosen, min(self.wanted.sources, MOST_LIVE))
        total = sum(score for _, score in best)
        return [(*self._live[passage], round(score / total, 3)) for passage, score in best]

    def end(
        self, session: Session, stats: GenerationStats, left: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """What was found about the answer that has ended; the next may begin. left: whether the
        client has gone; None then.
        """
        choices, self._choices = self._choices, Choices()
        found: dict[str, Any] = {}
        if self.wanted.sources:
            found = {"sources": self._sources(choices), "selections": choices.made}
        if self._figures is not None:
            found["figures"] = self._figures.of(session, stats)
        if self.wanted.check and session.answer_length:
            try:
                found["check"] = self._check(session, left)
            except _Left:
                return None
        return found

    def _sources(self, choices: Choices) -> list[dict[str, Any]]:
        most, text = self.wanted.sources, self._prompt.text
        if not choices.made:
            return []
        ranked = [
            (passage, place)
            for place in self._places
            for passage in rank_passages(
                text, self._prompt.ends, choices.counts, place.start, place.stop, most + 1
            )
        ]
        ranked.sort(key=lambda pair: -pair[0].score)
        ranked = untied(ranked, most, lambda pair: pair[0].score)
        total, found = sum(passage.score for passage, _ in ranked), []
        for passage, place in ranked:
            start = place.offset + passage.start - place.start
            content = self._contents[place.message]
            found.append(
                {
                    "message": place.message,
                    "start": start,
                    "stop": start + passage.stop - passage.start,
                    "line": 1 + content.count("\n", 0, start),
                    "tokens": [passage.first, passage.last],
                    "share": passage.score / total,
                    "text": passage.text,
                }
            )
        return found

    def _check(self, session: Session, left: Callable[[], bool]) -> dict[str, Any]:
        def progress(done: int, steps: int) -> None:
            if left():
                raise _Left

        report = session.check(self.wanted.check, progress)
        mass = report.mass_by_layer()
        return {
            "steps": len(report.steps),
            "agreement": report.agreement,
            "mean_kl": report.mean_kl,
            "worst_kl": report.worst.kl,
            "attention_mass": sum(mass.values()) / max(1, len(mass)),
            "context": report.context,
            "budget": report.budget,
        }


def wanted_of(body: Mapping[str, Any], sparse: bool, methods: Collection[str]) -> Wanted:
    """The field `omnikv` of a request. sparse: whether the server's method has layers that choose.
    methods: the names that `method` may be. Raises ApiError that names the field.
    """
    value = body.get("omnikv")
    if value is None:
        return Wanted()
    if not isinstance(value, Mapping):
        raise _refuse("omnikv", "an object such as {'sources': 5, 'check': 8}")
    if unknown := [str(name) for name in value if name not in FIELDS]:
        raise ApiError(
            400,
            f"omnikv.{unknown[0][:60]}: not known, expected {', '.join(FIELDS)}",
            f"omnikv.{unknown[0][:60]}",
            "unsupported_parameter",
        )
    method = value.get("method")
    if method is not None and (not isinstance(method, str) or method not in methods):
        raise _refuse("omnikv.method", f"one of {', '.join(methods)} from this server")
    sources = _count(value, "sources", MOST_SOURCES)
    check = _count(value, "check", MOST_CHECK)
    wanted = Wanted(
        sources, check, method, *(_flag(value, name) for name in ("live", "figures", "progress"))
    )
    if wanted.live and not (sources and body.get("stream")):
        raise _refuse("omnikv.live", "stream: true, and sources of 1 or more, beside it")
    if (sources or check) and (not sparse or method == "full"):
        name = "live" if wanted.live else "sources" if sources else "check"
        raise ApiError(
            400,
            f"omnikv.{name}: full attention reads every token at every step and chooses none; "
            "sparse steps need a server started with --method omnikv",
            f"omnikv.{name}",
            "unsupported_parameter",
        )
    return wanted


def _count(value: Mapping[str, Any], name: str, most: int) -> int:
    found = value.get(name)
    if found is None:
        return 0
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise _refuse(f"omnikv.{name}", f"an integer from 0 to {most}")
    return found


def _flag(value: Mapping[str, Any], name: str) -> bool:
    found = value.get(name)
    if found is not None and not isinstance(found, bool):
        raise _refuse(f"omnikv.{name}", "true or false")
    return bool(found)


def _refuse(param: str, expected: str) -> ApiError:
    return ApiError(400, f"{param}: expected {expected}", param, "invalid_value")
