"""Every method on both tiers through the chat itself: ten questions about a document, with sources,
checks, going back, branches, saving and coming back between them.

Each method runs `python -m engine.chat` as a person would, with lines on standard input, and is
then opened once more in this process for a branch and a way back, which the chat has no command
for. A step was answered, refused in one line, or failed: an exception, silence, a wrong exit code,
no end in time. Results are kept in a file, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine import LLM
from engine.base.errors import EngineError
from engine.chat.flags import parser
from engine.cli.settings import settings_of
from engine.methods.names import NAMES
from engine.methods.registry import methods
from engine.sampling.params import SamplingParams
from engine.session.session import Session
from tools.bench.header import commit
from tools.calibrate.pod_groups import read_blocks
from tools.common import page
from tools.common.arguments import command
from tools.common.program import POCKET, entry, replace_text, say

DOCUMENT = POCKET / "welcome.txt"
ASKED = (  # questions that the model's own hint and tests do not have, and what the document says
    ("What is the pass key of David?", "83434"),
    ("What is the special magic number for strict-wolf mentioned in the provided text?", "6302752"),
    ("What is the value of b808?", "43447"),
    ("Where does Oscar live?", "Lisbon"),
    ("What is the special magic number for bright-winter mentioned in the provided text?", "9629"),
    ("What is the value of l693?", "60328"),
    ("What is the favorite food of Felix?", "pancakes"),
    ("What is the pass key of Emma?", "93673"),
    ("Who is the spouse of Greta?", "Simon"),
    ("What is the value of o971?", "55610"),
)
BUDGET = {"tokens": 256, "dense_below": 0}  # so that a document of 1,584 tokens is read sparsely
OWN: dict[str, dict[str, object]] = {  # what a method cannot be without, or is dense without here
    "double_sparsity": {"channels": POCKET / "double_sparsity.json"},
    "duo": {"gates": POCKET / "duo.json", "tokens": None, "recent": 128},
    "fastgen": {"tokens": None},
    "infllm": {"block": 64, "init": 64, "local": 256, "topk": 4, "cached": 8, "chunk": 256},
    "hshare": {"sharing": POCKET / "hshare.json", "tokens": 256},
    "kascade": {"head_map": POCKET / "kascade.json"},
    "kascade_tiles": {"head_map": POCKET / "kascade.json"},
    "pod_snapkv": {"blocks": read_blocks(POCKET), "recent": 256, "tokens": 400},
    "pod_untrained": {"blocks": read_blocks(POCKET), "recent": 256},
    "pqcache": {"train": 1024},
    "razor": {"heads": POCKET / "razor.json", "recent": 256, "tokens": None},
    "kvzip": {"tokens": 400},
}
EXCEPTION = re.compile(r"^error: (\w+\.)*\w*(Error|Exception|Iteration|Exit|Warning|Interrupt)\b")
OPENING = "(opening)"  # before the first line is typed
MARK = re.compile(r"^seed = (\d+)$")  # what /set seed N prints: where step N begins


@dataclass
class Step:
    """What one line of the script came to."""

    line: str
    said: list[str] = field(default_factory=list)  # on stderr
    answers: list[str] = field(default_factory=list)  # on stdout

    @property
    def refused(self) -> str:
        """The line in which it was refused; "" where it was not."""
        return next((s for s in self.said if s.startswith("error: ")), "")

    @property
    def failed(self) -> str:
        """What is wrong with it; "" where it was answered or refused in one line."""
        wrong = [s for s in self.said if "Traceback" in s or EXCEPTION.match(s)]
        if wrong:
            return wrong[0]
        if self.line == OPENING:
            return ""
        if not self.line.startswith("/") or self.line == "/retry":
            if not self.refused and not "".join(self.answers).strip():
                return "an empty answer and no word about it"
        elif not self.said:
            return "silence"
        return ""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    asked = command(
        "python -m tools.studies.chats",
        "Every method on both tiers through the chat: answered, refused or failed.",
    )
    asked.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    asked.add_argument("--tiers", nargs="+", choices=("device", "host"), default=["device", "host"])
    asked.add_argument("--limit", type=float, default=240, help="seconds for one chat")
    asked.add_argument("--store", type=Path, help="keep results here, and go on from them")
    asked.add_argument("--out", type=Path, help="write the table to this file")
    return asked.parse_args(argv)


def flags(name: str, tier: str) -> list[str]:
    """The chat's flags for a method on a tier."""
    fields = {f.name for f in dataclasses.fields(methods()[name])}
    wanted = {k: v for k, v in BUDGET.items() if k in fields} | OWN.get(name, {})
    sets = [f"--set={key}={value}" for key, value in wanted.items() if value is not None]
    return ["--method", name, "--offload", tier, "--ctx", "4096", *sets]


def script(saved: Path) -> list[str]:
    """What a person types: ten questions with everything else between them."""
    ask = [question for question, _ in ASKED]
    before = [ask[0], "/sources", "/check 4", ask[1], "/retry", f"/save {saved}", ask[2]]
    after = [f"/load {saved}", ask[2], "/sources", "/check 4", "/stats", "/memory", "/reset"]
    return [*before, *after, *ask[3:], "/sources 3", "/check"]


def chat(name: str, tier: str, limit: float) -> tuple[list[Step], str]:
    """Run the script; the steps, and what was wrong with the program as a whole ("": nothing)."""
    with tempfile.TemporaryDirectory() as folder:
        lines = script(Path(folder) / "talk.omnikv")
        typed = "".join(f"/set seed {i}\n{line}\n" for i, line in enumerate(lines))
        command = [sys.executable, "-m", "engine.chat", "--json", "-f", str(DOCUMENT), "-n", "40"]
        command += ["--threads", "1", *flags(name, tier)]
        try:
            done = subprocess.run(
                command,
                input=typed,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as late:
            text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            return parsed(lines, text), f"no end after {limit:g} s"
    steps = parsed(lines, done.stdout)
    told = any(step.refused for step in steps)
    wrong = "" if done.returncode == 0 or (told and done.returncode > 0) else "and no line"
    return steps, f"exit code {done.returncode} {wrong}" if wrong else ""


def parsed(lines: Sequence[str], output: str) -> list[Step]:
    """Cut what the chat printed into steps: the opening, then one per line of the script."""
    steps = [Step(OPENING)]
    for text in output.splitlines():
        if mark := MARK.match(text):
            steps.append(Step(lines[int(mark[1])]))
        elif text.startswith('{"text"'):
            steps[-1].answers.append(json.loads(text)["text"])
        elif text.strip():
            steps[-1].said.append(text)
    return steps


def branches(name: str, tier: str) -> Iterator[tuple[str, str]]:
    """Yield (what, how it went) for a branch and a way back of a session: "same", the line of a
    refusal, or "FAILED: ..." where an exception is none of the engine's or a branch writes
    something else than what it left.
    """
    args = parser().parse_args([*flags(name, tier), "--threads", "1"])
    params = SamplingParams(max_tokens=8)
    try:
        llm = LLM(str(POCKET), **settings_of(args))
        with llm.session() as session:
            assert llm.tokenizer is not None
            ids = llm.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
            session.prefill(ids)
            yield "fork", guardedly(forked, session, params)
            yield "truncate", guardedly(gone_back, session, params)
    except EngineError as error:
        yield "open", str(error)


def guardedly(step, session: Session, params: SamplingParams) -> str:
    """The step's word, a refusal's line, or FAILED with an exception."""
    try:
        return step(session, params)
    except EngineError as error:
        return str(error)
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"


def written(session: Session, params: SamplingParams) -> list[int]:
    """The tokens that a session writes next."""
    return [p.token_id for p in session.generate([], params) if p.token_id is not None]


def forked(session: Session, params: SamplingParams) -> str:
    """Whether a branch writes what its origin writes, one after the other."""
    with session.fork() as branch:
        found, wanted = written(branch, params), written(session, params)
    return "same" if found == wanted else f"FAILED: {found} for {wanted}"


def gone_back(session: Session, params: SamplingParams) -> str:
    """Whether a session that goes back to the document's end writes the same again."""
    length = len(session) - params.max_tokens
    wanted = session.ids[length:]
    session.truncate(length)
    found = written(session, params)
    return "same" if found == wanted else f"other: {found} for {wanted}"


def result(name: str, tier: str, limit: float) -> dict[str, object]:
    """Everything that is known of a method on a tier."""
    steps, wrong = chat(name, tier, limit)
    asked = [s for s in steps if s.answers or (s.line != OPENING and s.line[0] != "/")]
    told = [s for s in steps if s.line in dict(ASKED)]
    right = {s.line for s in told if dict(ASKED)[s.line] in "".join(s.answers)}
    twice = [s.answers for s in told if s.line == ASKED[2][0]]
    retried = [s.answers for s in steps if s.line in (ASKED[1][0], "/retry")]
    failures = [wrong] * bool(wrong) + [f"{s.line}: {s.failed}" for s in steps if s.failed]
    refusals = [f"{s.line}: {s.refused}" for s in steps if s.refused and not s.failed]
    restored = "refused" if any(r.startswith("/load") for r in refusals) else ""
    if any(r.startswith("/save") for r in refusals):  # then there is nothing to come back to
        refusals = [r for r in refusals if not r.startswith("/load")]
    sides = dict(branches(name, tier))
    failures += [f"{what}: {how}" for what, how in sides.items() if how.startswith("FAILED")]
    return {
        "method": name,
        "tier": tier,
        "opened": len(steps) > 1,
        "answers": sum(bool("".join(s.answers).strip()) for s in asked),
        "right": len(right),
        "back": "same" if retried[1:] == retried[:1] else "other",
        "restored": restored or ("same" if twice[1:] == twice[:1] else "other"),
        **{f"/{word}": said(steps, f"/{word}") for word in ("sources", "check")},
        **sides,
        "refused": refusals,
        "failed": failures,
        "steps": [dataclasses.asdict(step) for step in steps],
    }


def said(steps: Sequence[Step], command: str) -> str:
    """The first line that a command printed the first time."""
    found = next((s for s in steps if s.line.startswith(command)), None)
    return found.said[0] if found is not None and found.said else ""


def table(rows: Sequence[dict]) -> str:
    """The results as a page."""
    out = [
        "# Ten questions through the chat, every method on both tiers",
        "",
        f"`python -m tools.studies.chats`, commit {commit()}: the shipped model, its document of "
        "1,584 tokens, ten questions that nothing else here asks. Answers: of 12, two questions "
        "being asked again (`/retry`; behind `/load`). Right: of ten. Back, restored, branch, cut: "
        "whether the same tokens come again.",
        "",
    ]
    shown = []
    for row in rows:
        if not row["opened"]:
            cells = ["-"] * 6
        else:
            sides = [str(row.get(s, "-")) for s in ("fork", "truncate")]
            short = ["same" if s == "same" else s.split(":")[0][:9] for s in sides]
            cells = [row["answers"], row["right"], row["back"], row["restored"], *short]
        counts = [len(row["refused"]), len(row["failed"])]
        shown.append([row["method"], row["tier"], *cells, *counts])
    head = "method | tier | answers | right | back | restored | branch | cut | refused | failed"
    out += page.table(head, shown)
    for title, key in (("What was refused", "refused"), ("What failed", "failed")):
        lines: dict[str, list[str]] = {}
        for row in rows:
            for line in dict.fromkeys(re.sub(r"\S*/talk\.omnikv", "FILE", s) for s in row[key]):
                lines.setdefault(line, []).append(f"{row['method']} ({row['tier']})")
        out += ["", f"## {title}", ""]
        out += [f"- {', '.join(who)}: `{line}`" for line, who in lines.items()] or ["Nothing."]
    for title, key in (("What /sources says first", "/sources"), ("What /check says", "/check")):
        kinds: dict[str, list[str]] = {}
        for row in rows:
            if row[key]:
                words = re.sub(r"\d[\d.,]*", "N", row[key].replace(row["method"], "METHOD"))
                kinds.setdefault(words, []).append(f"{row['method']} ({row['tier']})")
        out += ["", f"## {title}", ""]
        out += [f"- {line}: {', '.join(who)}" for line, who in kinds.items()]
    return "\n".join(out) + "\n"


def run(args: argparse.Namespace) -> int:
    """Run what has no result yet; exit code 1 where something failed."""
    rows: list[dict] = []
    if args.store and args.store.is_file():
        rows = [json.loads(line) for line in args.store.read_text(encoding="utf-8").splitlines()]
    known = {(row["method"], row["tier"]) for row in rows}
    for name in args.methods:
        for tier in args.tiers:
            if (name, tier) in known:
                continue
            rows.append(row := result(name, tier, args.limit))
            say(
                f"{name} {tier}: {row['answers']} answers, {row['right']} right, failed: "
                f"{row['failed'] or 'nothing'}, refused: {row['refused'] or 'nothing'}"
            )
            if args.store:
                replace_text(args.store, "".join(json.dumps(r) + "\n" for r in rows))
    rows = [r for r in rows if r["method"] in args.methods and r["tier"] in args.tiers]
    rows.sort(key=lambda r: (r["method"], r["tier"]))
    if args.out:
        replace_text(args.out, table(rows))
    print(table(rows))
    return int(any(row["failed"] for row in rows))


main = entry(arguments, run)


if __name__ == "__main__":
    sys.exit(main())
