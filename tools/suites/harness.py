"""Run lm-evaluation-harness' tasks in one process with the engine: every method, both tiers, every
budget.

Likelihoods come from the method's own decode steps (`continuation=steps`), which a server cannot
give: what is read as a prompt is mostly read by full attention (`continuation=prompt`, as
/v1/completions with echo). The harness itself is an extra: pip install '.[benchmarks]'.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from engine.base.checks import boolean, integer, one_of
from engine.base.errors import UsageError
from engine.cli.settings import method_with
from engine.load.options import LLMSettings
from engine.load.pocket import pocket_method
from tools.common.arguments import command
from tools.common.program import POCKET, guarded, progress, replace_json, say
from tools.suites.likelihood import WAYS, Score, by_prompt, by_steps, pieces

# a harness's names of what SamplingParams calls otherwise, or the same
DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
NEUTRAL = {"num_beams": 1}
EPILOG = """model arguments, KEY=VALUE with commas between them:
  model=FOLDER            alias, hub id or folder (default: the shipped model)
  method=NAME             with the method's own fields: method=quest,tokens=1024 or
                          method=omnikv,filter_layers=2:8:18,share=0.0667,dense_below=0
  continuation=steps      score what follows a context by decode steps, or =prompt
  asked=N                 read the last N tokens of a context by steps too
  max_length=N            cut longer requests from the left, and say how many (default: --ctx)
  max_gen_toks=N          of tasks that do not say (default 256)
  add_bos_token=true      (default: as the model's tokenizer does)
  device, dtype, offload, bank, weights, max_context, chunk, threads, rope, ...   as of LLM

examples:
  python -m tools.suites.harness --tasks arc_easy --model_args model=FOLDER,method=full
  python -m tools.suites.harness --tasks ruler --model_args \\
      model=FOLDER,method=omnikv,share=0.0667,dense_below=0,offload=host,max_context=32768
"""


class Harness:
    """lm-evaluation-harness' three requests, answered by an LLM under its own method.

    continuation: one of WAYS. asked: last tokens of a context that steps read. max_length: tokens
    that a prediction may see; what is longer loses its beginning and is counted in `cut`.
    Raises SettingError for arguments out of range.
    """

    def __init__(
        self,
        llm: LLM,
        continuation: str = "steps",
        asked: int = 0,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
    ) -> None:
        one_of("continuation", continuation, WAYS)
        integer("asked", asked, 0)
        most = llm.max_context - 1  # the last token that is predicted is read too
        integer("max_length", most if max_length is None else max_length, 1, most)
        integer("max_gen_toks", max_gen_toks, 1)
        if add_bos_token is not None:
            boolean("add_bos_token", add_bos_token)
        if llm.load().tokenizer is None:
            raise UsageError("this model has no tokenizer, so a harness cannot ask it")
        self.llm, self.continuation, self.asked = llm, continuation, asked
        self.max_length = most if max_length is None else max_length
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token
        self.cut, self.cache_hook = 0, None
        self.tally: Counter[str] = Counter()  # "steps" that scored, and the "sparse" ones of them

    # ---------------------------------------------------------------- tokens

    def encode(self, text: str, start: bool = True) -> list[int]:
        """Token ids. start: of a text from its beginning, which may have a start token."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        if self.add_bos_token is None:
            return tokenizer.encode(text, special=start)
        ids = tokenizer.encode(text, special=False)
        first = [self.prefix_token_id]
        return first + ids if start and self.add_bos_token and ids[:1] != first else ids

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text that nothing comes before: the model's start token, else
        its end token.
        """
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        found = tokenizer.backend.token_to_id(tokenizer.bos_token) if tokenizer.bos_token else None
        if found is None and not self.llm.end_token_ids:
            raise UsageError("this model has neither a start token nor an end token: no empty text")
        return self.llm.end_token_ids[0] if found is None else found

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both as the harness has them: of the continuation what both together have
        behind as many tokens as the context has alone, whose last spaces go to the continuation.
        Raises UsageError where nothing is left to predict.
        """
        bare = context.rstrip()
        context, continuation = bare, context[len(bare) :] + continuation
        if context:
            before, whole = self.encode(context), self.encode(context + continuation)
            ids = before, whole[len(before) :]
        else:
            ids = [self.prefix_token_id], self.encode(continuation, start=False)
            if ids[1][:1] == ids[0]:  # it begins so itself
                ids = ids[0], ids[1][1:]
        if not ids[1]:
            raise UsageError(f"found no tokens in the continuation {continuation!r}")
        return ids

    def fitting(self, context: list[int], rest: int) -> list[int]:
        """A context's last tokens, as many as `rest` further ones leave room for. Raises UsageError
        where they leave none.
        """
        room = self.max_length - rest
        if room < 1:
            raise UsageError(
                f"max_length: found {self.max_length} for a request of {rest} tokens beside its "
                "context, expected more"
            )
        self.cut += len(context) > room
        return context[-room:]

    # ---------------------------------------------------------------- requests

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Score]:
        """(log probability in nats, whether greedy decoding says so too) of each request's
        continuation behind its context. A context that several have is read once.
        """
        by_context: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for number, request in enumerate(requests):
            context, continuation = self.pair(*request.args)
            kept = self.fitting(context, len(continuation) - 1)
            by_context.setdefault(tuple(kept), []).append((number, continuation))
        found: dict[int, Score] = {}
        for ids, asked in by_context.items():
            for (number, _), score in zip(asked, self._scores(list(ids), [c for _, c in asked])):
                found[number] = score
                self._done("loglikelihood", requests[number].args, score)
            if not disable_tqdm:
                progress(f"{len(found)}/{len(requests)} continuations")
        self._end(len(requests), disable_tqdm)
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log probability in nats of each request's whole text, in windows of max_length."""
        found: list[float] = []
        for request in requests:
            ids = self.encode(request.args[0], start=False)
            total = 0.0
            for context, predicted in pieces(ids, self.prefix_token_id, self.max_length):
                total += self._scores(list(context), [list(predicted)])[0][0]
            found.append(total)
            self._done("loglikelihood_rolling", request.args, total)
            if not disable_tqdm:
                progress(f"{len(found)}/{len(requests)} texts")
        self._end(len(requests), disable_tqdm)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each request's answer, without the string that ended it."""
        found: list[str] = []
        for request in requests:
            text, given = request.args
            params = self.params_of(given)
            completion = self.llm.generate(
                self.fitting(self.encode(text), params.max_tokens), params
            )
            assert not isinstance(completion, list)  # of one prompt
            found.append(completion.text)
            self._done("generate_until", request.args, completion.text)
            if not disable_tqdm:
                progress(f"{len(found)}/{len(requests)} answers")
        self._end(len(requests), disable_tqdm)
        return found

    def params_of(self, given: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams of a request's settings: greedy unless do_sample. Raises UsageError for
        one that is not known.
        """
        settings = dict(given)
        until = settings.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        limits = [settings.pop(name) for name in LIMITS if name in settings]
        draws = bool(settings.pop("do_sample", False))
        own = {name: settings.pop(name) for name in DRAWN if settings.get(name) is not None}
        own["temperature"] = own.get("temperature", 1.0) if draws else 0.0
        for name, value in settings.items():
            if value is not None and NEUTRAL.get(name) != value:
                known = ", ".join(("until", "do_sample", *LIMITS, *DRAWN))
                raise UsageError(f"{name}: found {value!r}, expected one of {known}")
        return SamplingParams(
            max_tokens=int(limits[0]) if limits else self.max_gen_toks,
            stop=tuple(stop for stop in stops if stop),
            **own,
        )

    def _scores(self, context: list[int], continuations: list[list[int]]) -> list[Score]:
        if self.continuation == "prompt":
            return [by_prompt(self.llm, context, each) for each in continuations]
        return list(by_steps(self.llm, context, continuations, self.asked, self.tally))

    def _done(self, kind: str, arguments: Any, result: Any) -> None:
        if self.cache_hook is not None:  # lm_eval's, where it keeps answers
            self.cache_hook.add_partial(kind, arguments, result)

    def _end(self, count: int, quiet: bool) -> None:
        if not quiet:
            say("")
        if self.cut:
            say(
                f"{self.cut} of {count} requests lost their beginning: they were longer than "
                f"max_length={self.max_length} tokens"
            )
        if self.tally["steps"]:
            say(f"{self.tally['sparse']} of {self.tally['steps']} steps that scored were sparse")
        self.cut = 0
        self.tally.clear()

    # ---------------------------------------------------------------- chats

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A dialogue as the model's text."""
        assert self.llm.tokenizer is not None
        return self.llm.tokenizer.render(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's source, "" where there is none."""
        assert self.llm.tokenizer is not None
        found = self.llm.tokenizer.template
        return found.source if found else ""

    @property
    def tokenizer_name(self) -> str:
        """What requests that are kept are kept under."""
        return self.llm.name.replace("/", "__")


# -------------------------------------------------------------------- from a command line


def read_value(text: str) -> Any:
    """A model argument's value: true, false, none, a number, numbers with colons between them, or
    the text itself.
    """
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    if ":" in text and all(part.isdecimal() for part in text.split(":")):
        return tuple(map(int, text.split(":")))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def arguments_of(text: str) -> dict[str, Any]:
    """{key: value} of "key=value,key=value". Raises UsageError for a part that is neither."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--model_args: found {part!r}, expected KEY=VALUE")
        found[key] = read_value(value)
    return found


def harness_of(arguments: Mapping[str, Any]) -> Harness:
    """The Harness of model arguments. Raises SettingError and UsageError that name the argument."""
    left = dict(arguments)
    model = str(left.pop("model", POCKET))
    own = ("continuation", "asked", "max_length", "max_gen_toks", "add_bos_token")
    mine = {key: left.pop(key) for key in own if key in left}
    known = LLMSettings.__required_keys__ | LLMSettings.__optional_keys__
    name = left.pop("method", None)
    settings = {key: left.pop(key) for key in list(left) if key in known}
    if name is not None:
        settings["method"] = method_with(str(name), left, {})
    elif left:
        raise UsageError(f"--model_args: found {', '.join(left)}; of a method that is not named?")
    elif model == str(POCKET):
        settings["method"] = dataclasses.replace(pocket_method(), dense_below=0)
    return Harness(LLM(model, **settings), **mine)


def adapted(harness: Harness) -> Any:
    """The harness as lm_eval takes models. Raises UsageError where that is not installed."""
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise UsageError(
            f"lm_eval cannot be imported ({error}): pip install '.[benchmarks]', or run it over "
            "the server (docs/SERVER.md)"
        ) from error

    class Adapted(Harness, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            vars(self).update({k: v for k, v in vars(harness).items() if k != "cache_hook"})

    return Adapted()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.suites.harness",
        "Run lm-evaluation-harness' tasks on a model under any method, in one process.",
        EPILOG,
    )
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks as lm_eval names them")
    parser.add_argument("--model_args", default="", metavar="KEY=VALUE,...", help="see below")
    parser.add_argument("--limit", type=int, help="requests of each task")
    parser.add_argument("--num_fewshot", type=int, help="examples in front of each question")
    parser.add_argument("--include_path", help="folder with tasks of your own")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="ask through the model's chat template"
    )
    parser.add_argument(
        "--metadata",
        type=json.loads,
        help='JSON for tasks that take it: {"max_seq_lengths":[4096]}',
    )
    parser.add_argument("--out", type=Path, help="file for results as JSON")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Everything between the command line and the table."""
    model = adapted(harness_of(arguments_of(args.model_args)))
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    tasks = TaskManager(include_path=args.include_path, metadata=args.metadata)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=args.tasks,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        task_manager=tasks,
        apply_chat_template=args.apply_chat_template,
        log_samples=False,
    )
    print(make_table(found))
    if args.out is not None:
        kept = {"results": found["results"], "model_args": args.model_args}
        replace_json(args.out, json.loads(json.dumps(kept, default=str)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print the table. Exit code 0, 1 (it failed), 2 (usage) or 130 (Ctrl-C)."""
    args = arguments(argv)
    return guarded(lambda: run(args), "stopped")


if __name__ == "__main__":
    raise SystemExit(main())
