"""Answers that must follow a grammar: which tokens may come next, by llguidance (an extra).

A JSON schema is a client's: it is bounded before it comes here (engine/serve), nothing that it
refers to is fetched, and llguidance bounds the work of every step; beyond it the answer fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.base.errors import SettingError
from engine.base.figures import first_line
from engine.text.tokenizer import Tokenizer

MISSING = "needs llguidance: pip install llguidance"
# between the tokens of JSON; without a bound a small model may write spaces for ever
WRITING = {"whitespace_pattern": r" ?|\n {0,8}"}


class Grammars:
    """Makes grammars for one tokenizer. vocab_size: length of the logits. ends: the ids that end an
    answer. Raises SettingError where llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise SettingError(MISSING) from None
        self.library: Any = llguidance
        self.vocab_size, self.ends = vocab_size, tuple(ends)
        size = max(vocab_size, tokenizer.vocab_max_id + 1)
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=size, eos_token=list(ends)
        )

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema describes. Raises SettingError for a schema that cannot be used."""
        return self._made(
            lambda: self.library.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides=WRITING
            )
        )

    def lark(self, text: str) -> Grammar:
        """What a grammar in llguidance's form of Lark describes. Raises SettingError."""
        return self._made(lambda: self.library.LLMatcher.grammar_from_lark(text))

    def _made(self, source: Callable[[], str]) -> Grammar:
        try:
            made = source()
            wrong = self.library.LLMatcher.validate_grammar(made, self.tokenizer)
            if wrong and not wrong.startswith("WARNING"):
                raise SettingError(f"grammar: {first_line(wrong)[:300]}")
            first = self.library.LLMatcher(self.tokenizer, made, log_level=0)
        except BaseException as error:
            # for what it cannot read; a panic of Rust is no Exception
            known = isinstance(error, (ValueError, TypeError, OverflowError, RecursionError))
            if not known and type(error).__name__ != "PanicException":
                raise
            raise SettingError(f"grammar: {first_line(error)[:300]}") from None
        return Grammar(Matcher(self, first))


class Grammar:
    """What an answer must follow: SamplingParams.grammar. May begin any number of answers, each
    with a copy of the first state, which takes seconds to make for thousands of names.
    """

    def __init__(self, first: Matcher) -> None:
        first.require()
        self.grammars, self._first = first.grammars, first

    def begin(self) -> Matcher:
        """The state of one answer."""
        return self._first.copy()


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, grammars: Grammars, matcher: Any) -> None:
        self.grammars, self._matcher = grammars, matcher
        self._shifts = torch.arange(8, dtype=torch.uint8)
        self._ended = False

    def copy(self) -> Matcher:
        """An independent state that stands where this one does."""
        made = Matcher(self.grammars, self._matcher.deep_copy())
        made._ended = self._ended
        return made

    def allowed(self) -> torch.Tensor:
        """bool [vocab] on the host: the tokens that may come next. Raises SettingError where the
        grammar takes too much work.
        """
        size = self.grammars.vocab_size
        if self._ended or self._matcher.is_stopped():
            self.require()
            allowed = torch.zeros(size, dtype=torch.bool)
            allowed[list(self.grammars.ends)] = True
            return allowed
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self.require()
        allowed = ((packed[:, None] >> self._shifts) & 1).flatten()[:size].bool()
        if not allowed.any():
            raise SettingError(
                "grammar: found nothing that may follow, expected a schema that fits"
            )
        return allowed

    def took(self, token: int) -> None:
        """Go on behind a token."""
        if token in self.grammars.ends:
            self._ended = True
        elif not self._ended:
            self._matcher.consume_token(token)
            self.require()

    def require(self) -> None:
        """Raise SettingError where the grammar cannot be followed any further."""
        if self._matcher.is_error():
            raise SettingError(f"grammar: {first_line(self._matcher.get_error())[:300]}")
