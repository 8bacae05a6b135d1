"""One dialogue, or one growing text, on one session: what was fed or sampled is never tokenised or
read again.

The conversation keeps the text of what lies in the bank and where each token ends in it. A new turn
is the difference between what the chat template now writes and that text: only the difference is
encoded and fed. Where a template rewrites history, or a turn is taken back, the bank is cut at the
last common token, and what is read again is announced.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.chat.provenance import Trace
from engine.chat.sources import Choices, Passage, rank_passages
from engine.errors import TemplateError
from engine.text.stop import tokens_before

CONTEXT = 8  # ids before an answer that the incremental decoder looks at


@dataclass
class Document:
    """A document in the bank: its name and the characters start .. stop-1 of the conversation's
    text.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Read:
    """What Conversation.read did: tokens read now, tokens that this reading needs in all,
    characters that were kept.
    """

    tokens: int
    total: int
    characters: int


@dataclass
class _Feed:
    """Ids to feed, where each ends in the text that the bank will then hold, and that text."""

    ids: list[int]
    ends: array
    text: str


def common_length(one: str, other: str) -> int:
    """Length of the longest common beginning; by halves, since a text may have millions of
    characters.
    """
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


class Conversation:
    """Turns on a Session of an LLM. system: the system prompt. announce: gets a line where text
    must be read again.
    """

    def __init__(
        self, llm, system: str | None = None, announce: Callable[[str], None] = lambda line: None
    ):
        self.llm, self.tokenizer, self.announce = llm, llm.tokenizer, announce
        self.session = llm.session()
        self.templated = self.tokenizer.template is not None
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        if self.system is not None and not self.templated:
            raise TemplateError(
                "this model has no chat template, so it takes no system prompt (it completes text)"
            )
        self.session.truncate(0)
        # what the bank holds, and where each of its tokens ends in it
        self.text, self.ends = "", array("q")
        self.messages = (
            [{"role": "system", "content": self.system}] if self.system is not None else []
        )
        # content of a user turn that began with documents
        self.opened = ""
        self.asked: str | None = None  # a turn's content that has no answer yet
        self.documents: list[Document] = []
        self.choices, self.trace = Choices(), Trace()
        # (tokens, characters) in the bank where the last answer began
        self._answer_at: tuple[int, int] | None = None
        # the bank's last token is the model's end token
        self._ended = False

    # ---------------------------------------------------------------- turns

    def read(self, document: str, name: str, progress=None) -> Read:
        """Feed a document now, so that questions only append. On Ctrl-C in `progress` what was read
        stays.

        Returns what was read; fewer tokens than the total where it was interrupted. Raises
        ContextTooLong before reading.
        """
        document = document.strip("\n")
        opened = f"{self.opened}\n\n{document}" if self.opened else document
        target = self._opening(opened) if self.templated else f"{self._flow()}{document}\n\n"
        # the template does not write a turn's beginning as it stands
        if target is None:
            self.opened = opened
            return Read(0, 0, len(document))
        feed = self._reach(target)
        before = len(self.session)
        try:
            if feed.ids:
                self.session.prefill(feed.ids, progress)
        except KeyboardInterrupt:
            pass
        finally:
            self._account(before, feed)
        self.asked, self._answer_at = None, None
        start = target.rfind(document)
        start = start if start >= 0 else len(target) - len(document)
        kept = max(0, min(len(document), len(self.text) - start))
        if kept:
            self.documents.append(Document(name, start, start + kept))
            part = document[:kept]
            self.opened = f"{self.opened}\n\n{part}" if self.opened else part
        return Read(len(self.session) - before, len(feed.ids), kept)

    def ask(self, content: str, params=None, progress=None, should_stop=None) -> Iterator:
        """Pieces (engine.generate.Piece) of the answer to a message, or of the text's continuation.

        An interrupted answer stays as far as it came. A KeyboardInterrupt out of `progress` passes
        through; what was read stays, and retry() reads on. Raises TemplateError and ContextTooLong
        before anything is read.
        """
        if self.templated:
            content = (
                f"{self.opened}\n\n{content}" if self.opened and content else self.opened or content
            )
            target = self._render([*self.messages, {"role": "user", "content": content}], True)
        else:
            content = target = self._flow() + content
        self.asked = content
        yield from self._answer(target, params, progress, should_stop)

    @property
    def can_retry(self) -> bool:
        """Whether there is a message to answer: again, or for the first time after an interruption."""
        return self.asked is not None or self._answer_at is not None

    def retry(self, params=None, progress=None, should_stop=None) -> Iterator:
        """Answer the last message anew, or read on where its reading was interrupted; nothing where
        can_retry is False.
        """
        if not self.can_retry:
            return
        if self.asked is None:
            tokens, characters = self._answer_at
            self.asked = self.messages[-2]["content"] if self.templated else self.text[:characters]
            if self.templated:
                del self.messages[-2:]
            self._cut(tokens, characters)
        target = (
            self._render([*self.messages, {"role": "user", "content": self.asked}], True)
            if self.templated
            else self.asked
        )
        yield from self._answer(target, params, progress, should_stop)

    def _answer(self, target: str, params, progress, should_stop) -> Iterator:
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
        """Character of the conversation's text where the last answer began; its end where there is
        none.
        """
        return (self._answer_at or (0, len(self.text)))[1]

    def sources(self, most: int = 5) -> list[Passage]:
        """Passages of the documents (of everything before the last answer, where there are none)
        that it read most.
        """
        if not self.choices.made:
            return []
        spans = [(d.start, d.stop) for d in self.documents] or [(0, self.answer_start)]
        found = [
            p
            for start, stop in spans
            for p in rank_passages(self.text, self.ends, self.choices.counts, start, stop, most)
        ]
        return sorted(found, key=lambda passage: -passage.score)[:most]

    def _render(self, messages: list[dict], prompt: bool) -> str:
        """What the template writes, with the last answer as it lies in the bank wherever the
        template trims it.
        """
        target = self.tokenizer.render(messages, prompt)
        if self._answer_at is None or target.startswith(self.text):
            self._take_end(target)
            return target
        tokens, base = self._answer_at
        answer = self.text[base:]
        for wanted in (answer.strip(), answer.lstrip(), answer.rstrip()):
            if target.startswith(self.text[:base] + wanted):
                shift, stop = (
                    len(answer) - len(answer.lstrip()) if not wanted[:1].isspace() else 0,
                    base + len(wanted),
                )
                for i in range(tokens, len(self.ends)):
                    self.ends[i] = min(max(self.ends[i] - shift, base), stop)
                self.text = self.text[:base] + wanted
                self._take_end(target)
                break
        return target

    def _take_end(self, target: str) -> None:
        """Count the end token in the bank as the one that the template writes after an answer, or
        drop it.
        """
        if not self._ended:
            return
        self._ended = False
        written = self.tokenizer.token(self.session.ids[-1]) or ""
        if written and target.startswith(written, len(self.text)):
            self.text += written
            self.ends[-1] = len(self.text)
        else:
            self._cut(len(self.ends) - 1, len(self.text))

    def _opening(self, opened: str) -> str | None:
        """The text of a user turn as far as it does not depend on what follows `opened`; None where
        it is not in there.
        """
        written = [
            self._render(
                [*self.messages, {"role": "user", "content": f"{opened}\n\n{mark}"}], False
            )
            for mark in ("0", "1")
        ]
        common = written[0][: common_length(*written)]
        return common if opened[-40:].strip() in common and written[0] != written[1] else None

    def _flow(self) -> str:
        """A base model's text so far, without an end token."""
        if self._ended:
            self._cut(len(self.ends) - 1, len(self.text))
        return self.text

    def _reach(self, target: str) -> _Feed:
        """Cut the bank where its text leaves `target`, and encode what is missing."""
        common = common_length(self.text, target)
        if common < len(self.text):
            keep, held = tokens_before(self.ends, common), len(self.ends)
            if keep and not self.ends[keep - 1]:
                # a lone bos: it is encoded again with the text that follows it
                keep = 0
            self._cut(keep, self.ends[keep - 1] if keep else 0)
            if held - keep > 16:
                self.announce(
                    f"the conversation's text changed after token {keep}: {held - keep} tokens that were read "
                    "before are read again"
                )
        start = len(self.text)
        fresh = not len(self.session)
        ids, ends = self.tokenizer.encode_spans(
            target[start:], special=fresh and not self.templated, continues=not fresh
        )
        return _Feed(ids, array("q", (end + start for end in ends)), target)

    def _cut(self, tokens: int, characters: int) -> None:
        self.session.truncate(tokens)
        del self.ends[tokens:]
        self.text = self.text[:characters]
        self._ended = False
        self._answer_at = None
        for document in self.documents:
            document.stop = min(document.stop, characters)
        self.documents = [d for d in self.documents if d.start < d.stop]

    def _account(self, before: int, feed: _Feed) -> None:
        """Take over as much of a feed as lies in the bank, cut at a whole character."""
        fed = min(len(self.session) - before, len(feed.ids))
        if fed == len(feed.ids):
            self.ends.extend(feed.ends)
            self.text = feed.text
            return
        while fed and feed.ends[fed - 1] == feed.ends[fed]:
            fed -= 1
        self.session.truncate(before + fed)
        self.ends.extend(feed.ends[:fed])
        if fed:
            self.text = feed.text[: feed.ends[fed - 1]]

    def _take_answer(self, reason: str | None) -> None:
        """Append the sampled tokens in the bank to the text, and the answer to the messages."""
        first, base = len(self.ends), len(self.text)
        sampled = self.session.ids[first:]
        self._ended = reason == "stop" and sampled[-1] in self.llm.end_token_ids
        words = self.tokenizer.stream(self.session.ids[max(0, first - CONTEXT) : first])
        # tokens whose characters are not complete end where the character does
        waiting = 0
        for token_id in sampled:
            self.text += (part := words.push(token_id))
            waiting += 1
            if part:
                self.ends.extend([len(self.text)] * waiting)
                waiting = 0
        self.text += words.flush()
        self.ends.extend([len(self.text)] * waiting)
        if self.templated:
            self.messages += [
                {"role": "user", "content": self.asked},
                {"role": "assistant", "content": self.text[base:]},
            ]
        self.opened, self.asked, self._answer_at = "", None, (first, base)
