"""The fields of a request: types and ranges checked one by one, none that is known ignored.

Fields that nobody knows are ignored, as every server does. A field that is known and not supported
is refused unless it has the value that asks for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.base.checks import is_integer, is_number
from engine.base.errors import EngineError
from engine.sampling.params import SamplingParams
from engine.serve.errors import ApiError
from engine.serve.request.values import refuse, text_of

MOST_CHOICES = 8
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_TOP = 20  # alternatives per token
MOST_BIASES = 1024
REASONING = ("auto", "none", "deepseek")  # the last is the first's other name
# known, not supported: the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}


# of a completion alone, of a chat alone
COMPLETION_ONLY: dict[str, tuple[Any, ...]] = {"echo": (False,)}
CHAT_ONLY = (
    "chat_template_kwargs",
    "omnikv",
    "parallel_tool_calls",
    "response_format",
    "tool_choice",
    "tools",
)


@dataclass(frozen=True)
class Ask:
    """What a request asks for, beside its prompt. max_tokens: None where the client sets none.
    0: only the prompt is read. echo: the prompt's text stands before each answer. raw: what the
    model thinks is text of its answer. usage_always: every chunk of a stream says the usage.
    """

    params: SamplingParams
    max_tokens: int | None
    choices: int
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False
    raw: bool = False
    usage_always: bool = False

    @property
    def scores(self) -> bool:
        """Whether log probabilities of the prompt's own tokens are asked for."""
        return self.echo and self.logprobs


def ask_of(body: Mapping[str, Any], chat: bool) -> Ask:
    """The settings of a request. Raises ApiError that names the field."""
    refused = {**NEUTRAL, **(COMPLETION_ONLY if chat else dict.fromkeys(CHAT_ONLY, ()))}
    for name, neutral in refused.items():
        value = body.get(name)
        if value is not None and not any(
            value == n and type(value) in (type(n), float) for n in neutral
        ):
            raise ApiError(
                400, f"{name}: not supported by this server", name, "unsupported_parameter"
            )
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise refuse("stream_options", options, "an object")
    logprobs, top = _logprobs(body, chat)
    echo, streams = _boolean(body, "echo"), _boolean(body, "stream")
    if echo and logprobs and streams:
        raise refuse("stream", True, "false beside echo and logprobs")
    limit = _limit(body, 0 if echo else 1)
    settings: dict[str, Any] = {
        "max_tokens": limit or 1,
        "temperature": _number(body, "temperature", 1.0, 0, 2),
        "top_p": _number(body, "top_p", 1.0, 0, 1) or 1e-9,
        "top_k": max(0, _integer(body, "top_k", 0, -1, 1 << 30)),
        "min_p": _number(body, "min_p", 0.0, 0, 1),
        "repetition_penalty": _number(body, "repetition_penalty", 0, 0, 10)
        or _number(body, "repeat_penalty", 1.0, 0, 10)
        or 1.0,
        "presence_penalty": _number(body, "presence_penalty", 0.0, -2, 2),
        "frequency_penalty": _number(body, "frequency_penalty", 0.0, -2, 2),
        "seed": None
        if body.get("seed") is None
        else _integer(body, "seed", 0, -(2**63), 2**63 - 1) % 2**63,
        "stop": _stops(body),
        "stop_token_ids": _ids(body, "stop_token_ids"),
        "ignore_eos": _boolean(body, "ignore_eos"),
        "logprobs": max(top, 1) if logprobs else 0,
        "logit_bias": _biases(body),
        "min_tokens": _least(body, limit),
    }
    try:
        params = SamplingParams(**settings)
    except EngineError as error:
        name = str(error).partition(":")[0]
        raise ApiError(400, str(error), name, "invalid_value") from None
    choices = _integer(body, "n", 1, 1, MOST_CHOICES)
    if (best := body.get("best_of")) is not None and best != choices:
        raise refuse("best_of", best, f"{choices}, as n: every choice is returned")
    return Ask(
        params,
        limit,
        choices,
        streams,
        _boolean(options or {}, "include_usage", "stream_options.include_usage"),
        logprobs,
        echo,
        _raw(body),
        _boolean(options or {}, "continuous_usage_stats", "stream_options.continuous_usage_stats"),
    )


def _raw(body: Mapping[str, Any]) -> bool:
    """reasoning_format, as llama.cpp names its values."""
    value = body.get("reasoning_format")
    if value is not None and value not in REASONING:
        raise refuse("reasoning_format", value, f"one of {', '.join(REASONING)}")
    return value == "none"


def _limit(body: Mapping[str, Any], least: int) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return _integer(body, name, 1, least, 1 << 30)
    return None


def _least(body: Mapping[str, Any], limit: int | None) -> int:
    """min_tokens."""
    found = _integer(body, "min_tokens", 0, 0, 1 << 30 if limit is None else limit)
    for name, free in (("response_format", {"type": "text"}), ("tool_choice", "auto")):
        value = body.get(name)
        if found and value is not None and value not in (free, "none"):
            raise refuse("min_tokens", found, f"0 beside this {name}, which says where it ends")
    return found


def _logprobs(body: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """(whether asked for, alternatives per token)."""
    if not chat:
        value = body.get("logprobs")
        if value is None or value is False:
            return False, 0
        return True, _integer(body, "logprobs", 0, 0, MOST_TOP)
    wanted, top = _boolean(body, "logprobs"), _integer(body, "top_logprobs", 0, 0, MOST_TOP)
    if top and not wanted:
        raise refuse("top_logprobs", top, "logprobs: true beside it")
    return wanted, top


def _boolean(body: Mapping[str, Any], name: str, param: str | None = None) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refuse(param or name, value, "true or false")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not is_integer(value) or not least <= value <= most:
        raise refuse(name, value, f"an integer from {least} to {most}")
    return value


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not is_number(value) or not math.isfinite(value) or not least <= value <= most:
        raise refuse(name, value, f"a number from {least:g} to {most:g}")
    return value


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or len(found) > MOST_STOPS:
        raise refuse("stop", value, f"a string or at most {MOST_STOPS} of them")
    for item in found:
        if not 0 < len(text_of(item, "stop")) <= LONGEST_STOP:
            raise refuse("stop", item, f"strings of 1 to {LONGEST_STOP} characters")
    return tuple(found)


def _biases(body: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """logit_bias: {token id: number}, or pairs of them, as llama.cpp takes."""
    value = body.get("logit_bias")
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or len(pairs) > MOST_BIASES:
        raise refuse("logit_bias", value, f"an object of at most {MOST_BIASES} token ids")
    found = []
    token: Any
    bias: Any
    for pair in pairs:
        token, bias = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
            token = int(token)
        if not is_integer(token) or token < 0:
            raise refuse("logit_bias", token, "token ids")
        if not is_number(bias) or not math.isfinite(bias) or not -100 <= bias <= 100:
            raise refuse("logit_bias", bias, "numbers from -100 to 100")
        found.append((token, float(bias)))
    return tuple(found)


def _ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 64 or not all(map(is_integer, value)):
        raise refuse(name, value, "at most 64 token ids")
    return tuple(value)


def prompt_of(body: Mapping[str, Any], vocab_size: int) -> str | list[int]:
    """The prompt of a completion: one text, or token ids."""
    value = body.get("prompt")
    if isinstance(value, list) and len(value) == 1 and not is_integer(value[0]):
        value = value[0]
    if isinstance(value, str):
        return text_of(value, "prompt")
    if isinstance(value, list) and set(map(type, value)) == {int}:
        if min(value) < 0 or max(value) >= vocab_size:
            raise refuse("prompt", "an id out of range", f"ids from 0 to {vocab_size - 1}")
        return value
    raise refuse("prompt", value, "one string, or a list of token ids")
