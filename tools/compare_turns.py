"""The words of a conversation about a document: the prompt of a first question, and what follows an answer before the next one.

Through the model's own chat template; a base model gets its text with "Question:" and "Answer:".
"""

from engine.errors import UsageError


class Turns:
    """Prompts of one document. ids are token ids; `document` and questions are texts."""

    def __init__(self, tokenizer, document, questions):
        self.tokenizer, self.document, self.questions = tokenizer, document.rstrip(), questions
        self.plain = tokenizer.template is None
        whole = [self._encode(self._first(question), start=True) for question in questions]
        shared, least = 0, min(map(len, whole)) - 1         # every question keeps at least one token of its own
        while shared < least and all(ids[shared] == whole[0][shared] for ids in whole):
            shared += 1
        self.shared = whole[0][:shared]                     # what precedes every question
        self.own = [ids[shared:] for ids in whole]          # what follows it, per question

    def following(self, first, answer, second):
        """Ids between an answer and the next question's answer. first, second: numbers of questions; answer: the text that was said.

        Raises UsageError where the template does not write an earlier turn as it was said.
        """
        if self.plain:
            return self._encode(f"\nQuestion: {self.questions[second]}\nAnswer:")
        asked = [{"role": "user", "content": self._content(first)}]
        before = self.tokenizer.render(asked)
        asked += [{"role": "assistant", "content": answer}, {"role": "user", "content": self.questions[second]}]
        both = self.tokenizer.render(asked)
        for said in (answer, answer.strip(), answer.rstrip(), answer.lstrip()):
            if both.startswith(before + said) and len(both) > len(before + said):
                return self._encode(both[len(before + said):])
        raise UsageError("this model's chat template does not repeat an answer as it was said, so no second question can follow it: use "
                         "--turns 1")

    def _content(self, question):
        return f"{self.document}\n\n{self.questions[question]}"

    def _first(self, question):
        if self.plain:
            return f"{self.document}\n\nQuestion: {question}\nAnswer:"
        return self.tokenizer.render([{"role": "user", "content": f"{self.document}\n\n{question}"}])

    def _encode(self, text, start=False):
        return self.tokenizer.encode(text, special=start and self.plain)
