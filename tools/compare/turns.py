"""The text of a conversation about a document: the prompt of a first question, and the text between
an answer and the next one.

Through the model's own chat template; a base model gets its text with "Question:" and "Answer:".
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.errors import TemplateError, UsageError
from engine.text.tokenizer import Tokenizer
from tools.tasks.prompts import common_start, completed

PATIENCE = 3  # times that a template is asked: it has two seconds, which may pass on a busy machine
MARK = "0"  # stands for an answer, to find its place in a rendered dialogue


class Turns:
    """Prompts of one document. ids are token ids; `document` and questions are texts."""

    def __init__(self, tokenizer: Tokenizer, document: str, questions: Sequence[str]):
        self.tokenizer, self.document, self.questions = tokenizer, document.rstrip(), questions
        self.plain = tokenizer.template is None
        self._following: dict[tuple[int, int], list[int]] = {}
        self._prompts = [self._first(number) for number in range(len(questions))]
        whole = [self._encode(text, start=True) for text in self._prompts]
        shared = common_start(whole)
        self.shared = whole[0][:shared]  # ids before every question
        self.own = [ids[shared:] for ids in whole]  # ids that follow, per question

    def following(self, first: int, second: int) -> list[int]:
        """Ids between an answer to question `first` and the answer to question `second` (numbers).

        Raises UsageError where the template does not write an earlier turn as it was said.
        """
        if (first, second) not in self._following:
            self._following[first, second] = self._encode(self._between(first, second))
        return self._following[first, second]

    def _between(self, first: int, second: int) -> str:
        if self.plain:
            return f"\nQuestion: {self.questions[second]}\nAnswer:"
        again = {"role": "user", "content": self.questions[second]}
        both = self._render([self._asked(first), {"role": "assistant", "content": MARK}, again])
        if not both.startswith(self._prompts[first] + MARK):
            raise UsageError(
                "this model's chat template does not repeat a dialogue as it was said, "
                "so no second question can follow: use --turns 1"
            )
        return both[len(self._prompts[first] + MARK) :]

    def _asked(self, question: int) -> dict[str, str]:
        return {"role": "user", "content": f"{self.document}\n\n{self.questions[question]}"}

    def _first(self, question: int) -> str:
        if self.plain:
            return completed(self.document, self.questions[question])
        return self._render([self._asked(question)])

    def _render(self, messages: list[dict[str, str]]) -> str:
        for _ in range(PATIENCE - 1):
            try:
                return self.tokenizer.render(messages)
            except TemplateError:
                continue
        return self.tokenizer.render(messages)

    def _encode(self, text: str, start: bool = False) -> list[int]:
        return self.tokenizer.encode(text, special=start and self.plain)
