"""The words of a conversation about a document: the prompt of a first question, and what follows an
answer before the next one.

Through the model's own chat template; a base model gets its text with "Question:" and "Answer:".
"""

from engine.errors import TemplateError, UsageError

PATIENCE = 3  # a template has two seconds, which a busy machine may take away from it
MARK = "0"  # an answer whose place in a rendered dialogue is looked up


class Turns:
    """Prompts of one document. ids are token ids; `document` and questions are texts."""

    def __init__(self, tokenizer, document, questions):
        self.tokenizer, self.document, self.questions = tokenizer, document.rstrip(), questions
        self.plain, self._following = tokenizer.template is None, {}
        self._prompts = [self._first(number) for number in range(len(questions))]
        whole = [self._encode(text, start=True) for text in self._prompts]
        # every question keeps at least one token of its own
        shared, least = 0, min(map(len, whole)) - 1
        while shared < least and all(ids[shared] == whole[0][shared] for ids in whole):
            shared += 1
        self.shared = whole[0][:shared]  # what precedes every question
        self.own = [ids[shared:] for ids in whole]  # what follows it, per question

    def following(self, first, second):
        """Ids between an answer to question `first` and the answer to question `second` (numbers).

        Raises UsageError where the template does not write an earlier turn as it was said.
        """
        if (first, second) not in self._following:
            self._following[first, second] = self._encode(self._between(first, second))
        return self._following[first, second]

    def _between(self, first, second):
        if self.plain:
            return f"\nQuestion: {self.questions[second]}\nAnswer:"
        again = {"role": "user", "content": self.questions[second]}
        both = self._render([self._asked(first), {"role": "assistant", "content": MARK}, again])
        if not both.startswith(self._prompts[first] + MARK):
            raise UsageError(
                "this model's chat template does not repeat a dialogue as it was said, so no second question can follow: use "
                "--turns 1"
            )
        return both[len(self._prompts[first] + MARK) :]

    def _asked(self, question):
        return {"role": "user", "content": f"{self.document}\n\n{self.questions[question]}"}

    def _first(self, question):
        if self.plain:
            return f"{self.document}\n\nQuestion: {self.questions[question]}\nAnswer:"
        return self._render([self._asked(question)])

    def _render(self, messages):
        for left in reversed(range(PATIENCE)):
            try:
                return self.tokenizer.render(messages)
            except TemplateError:
                if not left:
                    raise

    def _encode(self, text, start=False):
        return self.tokenizer.encode(text, special=start and self.plain)
