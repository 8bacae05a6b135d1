"""How tokens are to be drawn, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.base.checks import boolean, found, integer, is_integer, is_number
from engine.base.errors import SettingError
from engine.text.boundary import valid
from engine.text.grammar import Grammar


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is sampled and when it ends. A field out of its range raises SettingError.

    max_tokens: most tokens written. min_tokens: before so many are written, no token that would end
    the answer is drawn; a stop string ends it all the same. temperature: 0 is greedy (top_k, top_p
    and min_p then do nothing). top_k: 0 is off. top_p: sample from the smallest set of tokens with
    this probability. min_p: least probability relative to the likeliest token. repetition_penalty:
    divides positive and multiplies negative logits of tokens already in the prompt or the answer,
    each once. presence_penalty is subtracted from the logits of tokens already in the answer,
    frequency_penalty as often as they are in it (negative: they come more often). seed: None draws
    a new one. stop: one or several strings that end the answer and are not shown. stop_token_ids:
    ids that end it, in addition to the model's end tokens. ignore_eos: continue past the model's
    end tokens. logprobs: n > 0 gives each piece its log probability and the n likeliest
    alternatives, under the model's own distribution (before penalty, temperature and filters).
    logit_bias: (token id, number added to its logit) pairs. grammar: what the answer must follow
    (engine/text/grammar.py); tokens that it forbids are never drawn.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        integer("max_tokens", self.max_tokens, 1)
        integer("min_tokens", self.min_tokens, 0)
        _number("temperature", self.temperature, 0.0, math.inf)
        integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        _number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        if self.seed is not None:
            integer("seed", self.seed, 0, 2**63 - 1)
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        boolean("ignore_eos", self.ignore_eos)
        integer("logprobs", self.logprobs, 0, 1000)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))


def _number(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    if (
        not is_number(value)
        or not math.isfinite(value)
        or not low <= value <= high
        or (above and value == low)
    ):
        start = f", above {low:g}" if above else f", {low:g} or more"
        end = "" if math.isinf(high) else f", at most {high:g}"
        bounds = " (finite)" if math.isinf(low) else start + end
        raise SettingError(f"{name}: found {found(value)}, expected a number{bounds}")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (tuple, list)) or not all(
        isinstance(item, str) and item for item in items
    ):
        raise SettingError(
            f"{name}: found {found(value)}, expected a string or several, none of them empty"
        )
    return tuple(valid(item, name) for item in items)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = (value,) if is_integer(value) else value
    if not isinstance(items, (tuple, list)) or not all(
        is_integer(item) and item >= 0 for item in items
    ):
        raise SettingError(f"{name}: found {found(value)}, expected token ids, each 0 or more")
    return tuple(items)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, (tuple, list)) or not all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and is_integer(pair[0])
        and pair[0] >= 0
        and is_number(pair[1])
        and math.isfinite(pair[1])
        for pair in pairs
    ):
        raise SettingError(
            f"logit_bias: found {found(value)}, expected (token id, finite number) pairs"
        )
    return tuple((int(i), float(bias)) for i, bias in pairs)
