"""A method at a budget in tokens, the same at every length of a document, as in the OmniKV paper's
Table 3.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from engine.methods.base import Method
from tools.compare.build import Entry, Facts


def at_tokens(facts: Facts, entry: Entry, tokens: int) -> Method | str:
    """The method of an entry with a budget of `tokens`, or a text why there is none.

    A method without a setting of that name (InfLLM's windows and blocks, MInference's lines) is
    built at the share of the session that so many tokens are.
    """
    if tokens >= facts.capacity:
        return f"a session of {facts.capacity:,} tokens has no {tokens:,} to leave some out"
    made: Any = entry.build(facts, tokens / facts.capacity)
    if isinstance(made, str) or not {"tokens", "share"} <= {f.name for f in fields(made)}:
        return made
    found: Method = replace(made, share=None, tokens=tokens)
    return found
