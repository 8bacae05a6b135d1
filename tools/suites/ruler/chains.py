"""Variable tracking: a chain of assignments in noise, behind an example of the same."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase

from tools.suites.prompts.fitting import fresh
from tools.suites.prompts.instance import Instance
from tools.suites.ruler.needles import noise
from tools.suites.ruler.placing import between

# the prompt is RULER's own (Apache-2.0)
BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)
EXAMPLE_LINES = 14  # of noise: the example has about 500 tokens


@dataclass(frozen=True)
class Chains:
    """hops: assignments of one variable to the next. pieces: sentences of noise."""

    hops: int = 4

    @property
    def least(self) -> int:
        """Pieces of the shortest context: a line for each assignment."""
        return 5 * (self.hops + 1)

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt with an example in front."""
        made: set[str] = set()
        example = self._one(rng, 5 * EXAMPLE_LINES, 3, made)
        shown = example.before + example.context + example.question + example.prefix
        found = self._one(rng, pieces, 5, made)
        before = f"{shown} {' '.join(example.answers)}\n\n{found.before}"
        return Instance(
            before, found.context, found.question, found.prefix, found.answers, found.evidence
        )

    def _one(self, rng: Random, pieces: int, letters: int, made: set[str]) -> Instance:
        """A chain of variables of so many letters in so many sentences of noise."""
        names = [
            fresh(made, lambda: "".join(rng.choices(ascii_uppercase, k=letters)))
            for _ in range(self.hops + 1)
        ]
        value = fresh(made, lambda: str(rng.randint(10_000, 99_998)))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {after} = VAR {name} " for name, after in zip(names, names[1:])]
        context = "\n".join(between(rng, noise(pieces), chain))
        question, prefix = (
            part.format(value=value, count=self.hops + 1) for part in (QUESTION, PREFIX)
        )
        return Instance(BEFORE, context, question, prefix, names, chain)
