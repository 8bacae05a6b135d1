"""One dialogue, or one growing text, on one session, without reading anything twice.

A conversation keeps the text of the tokens in the bank and the position where each token ends in
that text. A new turn is the difference between what the chat template writes now and that text;
only the difference is encoded and fed. Where a template rewrites earlier turns, or a turn is taken
back, the bank is cut at the last common token, and the conversation announces what it reads again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.base.errors import SavedFileError, TemplateError
from engine.evidence.provenance import Trace
from engine.evidence.sources import Choices, Passage, rank_passages, untied
from engine.llm import LLM
from engine.plan.prefill_time import PrefillProgress
from engine.sampling.params import SamplingParams
from engine.saved.cache import BlockCache
from engine.session.results import Piece
from engine.session.session import Session
from engine.terminal.documents import Document, Read
from engine.text.literal import Written, agreement, common_length
from engine.text.stop import tokens_before

CONTEXT = 8  # ids before an answer that the incremental decoder looks at
# what comes back from a file as it was
KEPT = ("text", "literal", "messages", "system", "opened", "asked", "_answer_at", "_ended")
ANNOUNCED = 16  # tokens; reading fewer again is not worth a line


@dataclass
class _Feed:
    """Ids to feed, the text that the bank holds afterwards, and where each id ends in it."""

    ids: list[int]
    ends: array
    written: Written


class Conversation:
    """Turns on one Session of an LLM.

    system: the system prompt, which needs a chat template (else TemplateError). announce: called
    with a line when text must be read again.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        announce: Callable[[str], None] = lambda line: None,
    ):
        self.llm, self.announce = llm, announce
        self.cache: BlockCache | None = None  # rows of documents on disk
        self.session = llm.session()
        assert llm.tokenizer is not None, "a conversation needs a model with a tokenizer"
        self.tokenizer = llm.tokenizer
        self.templated = self.tokenizer.template is not None
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Empty the bank and forget all turns and documents; the system prompt stays."""
        if self.system is not None and not self.templated:
            raise TemplateError(
                "this model has no chat template: it completes text and takes no system prompt"
            )
        self.session.truncate(0)
        # text of the tokens in the bank, and where each of them ends in it
        self.text, self.ends = "", array("q")
        # characters of it where a control token is spelled that is text
        self.literal: tuple[int, ...] = ()
        self.messages = (
            [{"role": "system", "content": self.system}] if self.system is not None else []
        )
        # documents with which the next user turn begins
        self.opened = ""
        self.asked: str | None = None  # content of a user turn without an answer yet
        self.documents: list[Document] = []
        # (tokens, characters) in the bank, and `opened`, behind the documents before any question
        self.home: tuple[int, int, str] = (0, 0, "")
        self.choices, self.trace = Choices(), Trace()
        # (tokens, characters) in the bank where the last answer began
        self._answer_at: tuple[int, int] | None = None
        # whether the bank's last token is the model's end token
        self._ended = False

    def rewind(self) -> None:
        """Forget all turns; the documents that were read before them stay, and the system prompt.

        Empties the bank where no document was.
        """
        tokens, characters, opened = self.home
        if not opened:
            return self.reset()
        self._cut(tokens, characters)
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.opened, self.asked = opened, None
        self.choices, self.trace = Choices(), Trace()

    # ---------------------------------------------------------------- on disk

    def state(self) -> dict[str, Any]:
        """What a saved session brings back beside its bank, for `resume`."""
        documents = [(d.name, d.start, d.stop) for d in self.documents]
        kept = {name: getattr(self, name) for name in KEPT}
        ends = torch.tensor(self.ends, dtype=torch.int64)
        return {"chat": 1, "ends": ends, "documents": documents, "home": self.home, **kept}

    def resume(self, session: Session, state: Any) -> None:
        """Go on with a restored session in place of this one, or raise SavedFileError."""
        try:
            ends = array("q", state["ends"].tolist())
            documents = [Document(*item) for item in state["documents"]]
            kept = {name: state[name] for name in KEPT}
            whole = len(ends) == len(session) and list(ends) == sorted(ends)
            if state["chat"] != 1 or not whole or (ends and ends[-1] > len(kept["text"])):
                raise ValueError("ends")
            tokens, characters, opened = state.get("home", (0, 0, ""))  # none in older files
            if not (0 <= tokens <= len(ends) and 0 <= characters <= len(kept["text"])):
                raise ValueError("home")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise SavedFileError("the file holds a session, but no conversation") from None
        before, self.session = self.session, session
        session.watch_with(before.watch)
        before.close()
        self.ends, self.documents, self.home = ends, documents, (tokens, characters, str(opened))
        self.__dict__.update(kept)
        self.choices, self.trace = Choices(), Trace()

    # ---------------------------------------------------------------- turns

    def read(
        self,
        document: str,
        name: str,
        progress: Callable[[PrefillProgress], None] | None = None,
        heading: str = "",
    ) -> Read:
        """Feed a document now, so that questions about it only append. heading: text before it.

        A KeyboardInterrupt from `progress` ends the reading; what was read stays. Raises
        ContextTooLong before anything is read.
        """
        document = document.strip("\n")
        # a document behind a question, answered or not, is no beginning
        first = self.home[:1] == (len(self.session),) and not self._ended
        opened = self._opened_with(heading + document)
        if self.templated:
            target = self._opening(opened)
        else:
            target = self._as_text(f"{self._flow()}{heading}{document}\n\n")
        if target is None:  # the template changes the beginning of a turn: wait for the question
            self.opened = opened
            self.home = (*self.home[:2], opened) if first else self.home
            return Read(0, 0, len(document))
        feed = self._reach(target)
        before = len(self.session)
        try:
            if feed.ids:
                self._read_ids(feed.ids, progress)
        except KeyboardInterrupt:
            pass
        finally:
            self._account(before, feed)
        self.asked, self._answer_at = None, None
        start = target.text.rfind(document)
        start = start if start >= 0 else len(target.text) - len(document)
        kept = max(0, min(len(document), len(self.text) - start))
        if kept:
            self.documents.append(Document(name, start, start + kept))
            self.opened = self._opened_with(heading + document[:kept])
            if first:
                self.home = (len(self.session), len(self.text), self.opened)
        return Read(len(self.session) - before, len(feed.ids), kept)

    def _opened_with(self, text: str) -> str:
        return f"{self.opened}\n\n{text}" if self.opened and text else self.opened or text

    def _read_ids(self, ids: list[int], progress: Callable[[PrefillProgress], None] | None) -> None:
        """Prefill ids, but for those whose rows the cache has; keep all in it."""
        before = len(self.session)
        if self.cache is not None:
            self.cache.fill(self.session, [*self.session.ids, *ids])
        self.session.prefill(ids[len(self.session) - before :], progress)
        if self.cache is not None:
            self.cache.store(self.session)

    def ask(
        self,
        content: str,
        params: SamplingParams | None = None,
        progress: Callable[[PrefillProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[Piece]:
        """Yield the pieces of the answer to a message, or of the text's continuation.

        An interrupted answer stays as far as it was written. A KeyboardInterrupt from `progress`
        passes through; what was read stays, and retry() reads on. Raises TemplateError and
        ContextTooLong before anything is read.
        """
        if self.templated:
            content = self._opened_with(content)
            target = self._render([*self.messages, {"role": "user", "content": content}], True)
        else:
            content = self._flow() + content
            target = self._as_text(content)
        self.asked = content
        yield from self._answer(target, params, progress, should_stop)

    @property
    def can_retry(self) -> bool:
        """Whether there is a message to answer, again or after an interruption."""
        return self.asked is not None or self._answer_at is not None

    def retry(
        self,
        params: SamplingParams | None = None,
        progress: Callable[[PrefillProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[Piece]:
        """Answer the last message again, or read on where its reading was interrupted.

        Yields nothing where can_retry is False.
        """
        if self.asked is None:
            if self._answer_at is None:
                return
            tokens, characters = self._answer_at
            self.asked = self.messages[-2]["content"] if self.templated else self.text[:characters]
            if self.templated:
                del self.messages[-2:]
            self._cut(tokens, characters)
        target = (
            self._render([*self.messages, {"role": "user", "content": self.asked}], True)
            if self.templated
            else self._as_text(self.asked)
        )
        yield from self._answer(target, params, progress, should_stop)

    def _answer(
        self,
        target: Written,
        params: SamplingParams | None,
        progress: Callable[[PrefillProgress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> Iterator[Piece]:
        feed = self._reach(target)
        before = len(self.session)
        self.choices, self.trace = Choices(), Trace()
        pieces = self.session.generate(feed.ids, params, progress=progress, should_stop=should_stop)
        reason = None
        try:
            for piece in pieces:
                reason = piece.finish_reason
                chosen, scores = self.session.selections, self.session.selection_scores
                self.choices.add(chosen, scores)
                self.trace.add(piece.text, chosen, scores)
                yield piece
        finally:
            pieces.close()
            self._account(before, feed)
            if len(self.session) > len(self.ends):
                self._take_answer(reason)

    # ---------------------------------------------------------------- what the bank holds

    @property
    def answer_start(self) -> int:
        """Character at which the last answer begins in the text; its end where there is none."""
        return (self._answer_at or (0, len(self.text)))[1]

    def sources(self, most: int = 5) -> list[Passage]:
        """Return at most `most` passages that the last answer read most, best first.

        They are passages of the documents, or of all that precedes the answer if there are none;
        none that ties with one left out.
        """
        if not self.choices.made:
            return []
        spans = [(d.start, d.stop) for d in self.documents] or [(0, self.answer_start)]
        found = [
            p
            for start, stop in spans
            for p in rank_passages(self.text, self.ends, self.choices.counts, start, stop, most + 1)
        ]
        found.sort(key=lambda passage: -passage.score)
        return untied(found, most, lambda passage: passage.score)

    def _as_text(self, text: str) -> Written:
        """A base model's text, of which nothing is a control token."""
        return self.tokenizer.controls.as_text(text)

    def _held(self) -> Written:
        """The text of the bank's tokens."""
        return Written(self.text, self.literal)

    def _render(self, messages: list[dict], prompt: bool) -> Written:
        """Render messages. Where the template trims the last answer, trim the bank's text too."""
        written = self.tokenizer.write(messages, prompt)
        target = written.text
        if self._answer_at is None or target.startswith(self.text):
            self._take_end(target)
            return written
        tokens, base = self._answer_at
        answer = self.text[base:]
        for wanted in (answer.strip(), answer.lstrip(), answer.rstrip()):
            if target.startswith(self.text[:base] + wanted):
                shift = len(answer) - len(answer.lstrip()) if not wanted[:1].isspace() else 0
                stop = base + len(wanted)
                for i in range(tokens, len(self.ends)):
                    self.ends[i] = min(max(self.ends[i] - shift, base), stop)
                self.text = self.text[:base] + wanted
                moved = (at if at < base else at - shift for at in self.literal)
                self.literal = tuple(at for at in moved if at < stop)
                self._take_end(target)
                break
        return written

    def _take_end(self, target: str) -> None:
        """Keep the bank's end token if the template writes it after the answer, else drop it."""
        if not self._ended:
            return
        self._ended = False
        written = self.tokenizer.token(self.session.ids[-1]) or ""
        if written and target.startswith(written, len(self.text)):
            self.text += written
            self.ends[-1] = len(self.text)
        else:
            self._cut(len(self.ends) - 1, len(self.text))

    def _opening(self, opened: str) -> Written | None:
        """Return the beginning of a user turn that does not depend on what follows `opened`.

        Returns None where the template leaves no such beginning. Renders the turn with two
        different endings and takes what they have in common.
        """
        written = [
            self._render(
                [*self.messages, {"role": "user", "content": f"{opened}\n\n{mark}"}], False
            )
            for mark in ("0", "1")
        ]
        one, other = written
        common = one.cut(common_length(one.text, other.text))
        found = opened[-40:].strip() in common.text and one.text != other.text
        return common if found else None

    def _flow(self) -> str:
        """Return a base model's text so far, after dropping its end token from the bank."""
        if self._ended:
            self._cut(len(self.ends) - 1, len(self.text))
        return self.text

    def _reach(self, target: Written) -> _Feed:
        """Cut the bank where its text departs from `target`, and encode the rest of `target`."""
        common = agreement(self._held(), target, common_length(self.text, target.text))
        if common < len(self.text):
            keep, held = tokens_before(self.ends, common), len(self.ends)
            if keep and not self.ends[keep - 1]:
                # a lone bos is encoded again with the text that follows it
                keep = 0
            self._cut(keep, self.ends[keep - 1] if keep else 0)
            if held - keep > ANNOUNCED:
                self.announce(
                    f"the chat template rewrote the conversation after token {keep:,}: "
                    f"{held - keep:,} tokens are read again"
                )
        start = len(self.text)
        fresh = not len(self.session)
        ids, ends = self.tokenizer.encode_spans(
            target.since(start), special=fresh and not self.templated, continues=not fresh
        )
        return _Feed(ids, array("q", (end + start for end in ends)), target)

    def _cut(self, tokens: int, characters: int) -> None:
        """Keep the first `tokens` tokens, which spell the first `characters` characters."""
        if (again := self.session.tokens_again(tokens)) > ANNOUNCED:
            why = f"{self.session.method.name} has dropped what {again:,} tokens were"
            if self.session.bank.recurrent is not None:
                why = f"the recurrent layers stand {again:,} tokens before this place"
            self.announce(f"{why}: they are run again")
        self.session.truncate(tokens, later=True)
        del self.ends[tokens:]
        self._hold(self._held().cut(characters))
        self._ended = False
        self._answer_at = None
        if tokens < self.home[0]:
            self.home = (0, 0, "")
        for document in self.documents:
            document.stop = min(document.stop, characters)
        self.documents = [d for d in self.documents if d.start < d.stop]

    def _hold(self, written: Written) -> None:
        self.text, self.literal = written.text, written.literal

    def _account(self, before: int, feed: _Feed) -> None:
        """Add to the text what the bank holds of a feed, cut at a whole character."""
        fed = min(len(self.session) - before, len(feed.ids))
        if fed == len(feed.ids):
            self.ends.extend(feed.ends)
            self._hold(feed.written)
            return
        while fed and feed.ends[fed - 1] == feed.ends[fed]:
            fed -= 1
        self.session.truncate(before + fed)
        self.ends.extend(feed.ends[:fed])
        if fed:
            self._hold(feed.written.cut(feed.ends[fed - 1]))

    def _take_answer(self, reason: str | None) -> None:
        """Add the sampled tokens to the text, and the answer to the messages."""
        first, base = len(self.ends), len(self.text)
        sampled = self.session.ids[first:]
        self._ended = reason == "stop" and sampled[-1] in self.llm.end_token_ids
        words = self.tokenizer.stream(self.session.ids[max(0, first - CONTEXT) : first])
        # a token that holds part of a character ends where the character does
        waiting = 0
        for token_id in sampled:
            self.text += (part := words.push(token_id))
            waiting += 1
            if part:
                self.ends.extend([len(self.text)] * waiting)
                waiting = 0
        self.text += words.flush()
        self.ends.extend([len(self.text)] * waiting)
        # what the model spelled without being the token is text
        spelled = self.tokenizer.controls.special.finditer(self.text, base)
        self.literal += tuple(match.start() for match in spelled)
        if self.templated:
            assert self.asked is not None  # ask() and retry() have set it
            self.messages += [
                {"role": "user", "content": self.asked},
                {"role": "assistant", "content": self.text[base:]},
            ]
        self.opened, self.asked, self._answer_at = "", None, (first, base)
