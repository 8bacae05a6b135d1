"""A coding agent's turns over a server: what of each prompt is read, and what is read again.

python -m tests.programs.agent_turns --turns 60 --methods full omnikv --seed 0

The agent gets calls of tools, sends results of a few hundred tokens, and does what agents do to
earlier turns: it clears an old result, takes its last steps back and goes another way, and asks
another agent in between. The calls are scripted, since the shipped model knows no tools; its steps,
its rows and all that reads and keeps them are the server's own. For each turn: the prompt's tokens,
those behind the longest beginning that an earlier turn left (no prefix cache could read fewer), and
those that were read. Exit code 0, or 1 where a turn read what it need not have.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, Full, OmniKV
from engine.batch.slots import common
from engine.serve.request.tools import messages_of, tools_of
from tests.engine.serve.conftest import Running, serving
from tests.engine.serve.scripted import saying
from tests.engine.serve.tool_checkpoint import tool_checkpoint

SETTINGS = {"max_context": 32768, "chunk": 512, "threads": 1}
METHODS = {"full": Full(), "omnikv": OmniKV(tokens=512, dense_below=0)}
PATHS = ["src/main.c", "src/parse.c", "src/print.c", "tests/all.sh"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function that a model may call."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"To {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
TOOLS = [
    tool("read_file", path=TEXT),
    tool("edit_file", path=TEXT, line={"type": "integer"}, text=TEXT),
    tool("run", command=TEXT),
]


@dataclass
class Turn:
    """One request. kind: what the agent did before it."""

    kind: str
    prompt: int
    new: int
    read: int
    sparse_steps: int


@dataclass
class Agent:
    """A client and what it has said so far. left: tokens of each conversation as turns left it."""

    server: Running
    random: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    left: list[list[int]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def call(self) -> str:
        """What the model says next, with a call."""
        path = self.random.choice(PATHS)
        name, arguments = self.random.choice(
            [
                ("read_file", {"path": path}),
                ("edit_file", {"path": path, "line": 20, "text": self.text(12)}),
                ("run", {"command": "make check"}),
            ]
        )
        written = json.dumps({"name": name, "arguments": arguments})
        said = self.random.choice(["", "Now the next file.\n"])
        return f"{said}<tool_call>\n{written}\n</tool_call>"

    def ask(self, kind: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """One turn; the assistant's message."""
        body = {"model": "pocket", "messages": messages, "tools": TOOLS, "temperature": 0}
        with saying(self.server.service.llm, self.call(), pytest.MonkeyPatch()):
            more = {"omnikv": {"figures": True}}
            reply = self.server.post("/v1/chat/completions", body | more, timeout=600)
        assert reply.status_code == 200, reply.text
        found, usage = reply.json()["choices"][0], reply.json()["usage"]
        assert found["finish_reason"] == "tool_calls", found
        message = {k: v for k, v in found["message"].items() if v is not None}
        ids = self._ids(messages)
        assert len(ids) == usage["prompt_tokens"]
        new = len(ids) - max((common(ids, old) for old in self.left), default=0)
        read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        figures = found["omnikv"]["figures"]
        self.turns.append(Turn(kind, len(ids), new, read, figures["sparse_steps"]))
        self.left.append(self._ids([*messages, message]))
        return message

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        tools = tools_of({"tools": TOOLS})
        assert tools is not None
        turns = messages_of({"messages": messages}, True)
        return self.server.service.prompts.chat(turns, tools.offered).ids

    def text(self, words: int) -> str:
        """What a tool prints."""
        lines = [
            f"{self.random.choice(PATHS)}:{self.random.randrange(900)}: "
            f"{self.random.choice(['int', 'char', 'return'])} v{self.random.randrange(99)};"
            for _ in range(words // 4)
        ]
        return "\n".join(lines)

    def step(self, kind: str) -> None:
        """Ask, and append the call and its result."""
        message = self.ask(kind, self.messages)
        self.messages.append(message)
        (call,) = message["tool_calls"]
        words = self.random.choice([20, 60, 120])
        result = {"role": "tool", "tool_call_id": call["id"], "content": self.text(words)}
        self.messages.append(result)

    def go(self, turns: int) -> None:
        """All turns: of 12, one asks another agent, one goes back, one clears an old result."""
        self.messages = [{"role": "user", "content": "Make the tests pass. " + self.text(200)}]
        for number in range(turns):
            if number % 12 == 5:
                side = f"Find where v{number} is set. " + self.text(40)
                self.ask("another agent", [{"role": "user", "content": side}])
            elif number % 12 == 8:
                self.messages = self.messages[:-4]
                self.messages.append({"role": "user", "content": f"No. Try way {number}."})
                self.step("last steps taken back")
            elif number % 12 == 11:
                results = [m for m in self.messages if m["role"] == "tool"]
                results[-8]["content"] = "[cleared]"
                self.step("old result cleared")
            else:
                self.step("first" if not number else "call and result")


def rows(method: str, turns: Sequence[Turn]) -> Iterator[str]:
    """The rows of a table, by kind."""
    for kind in dict.fromkeys(turn.kind for turn in turns):
        mine = [turn for turn in turns if turn.kind == kind]
        mean = [
            sum(getattr(t, name) for t in mine) / len(mine) for name in ("prompt", "new", "read")
        ]
        again = [turn.read - turn.new for turn in mine]
        figures = " | ".join(f"{value:,.0f}" for value in mean)
        yield f"| {method} | {kind} | {len(mine)} | {figures} | {sum(again)} ({max(again)}) |"


def run(folder: Path, method: str, turns: int, seed: int) -> list[Turn]:
    """The turns of one agent over a server of its own. folder: of the checkpoint."""
    llm = LLM(str(folder), method=METHODS[method], load=False, **SETTINGS)
    with serving(llm, slots=3, most=8 << 20) as server:
        agent = Agent(server, random.Random(seed))
        agent.go(turns)
    return agent.turns


def wrong(method: str, turns: Sequence[Turn]) -> list[str]:
    """What must not be: a turn that read more than it had to, or was not sparse where it should."""
    found = [
        f"{method}, turn {number}, {turn.kind}: read {turn.read} tokens, {turn.new} of them new"
        for number, turn in enumerate(turns)
        if turn.read > turn.new
    ]
    if (method == "omnikv") != all(turn.sparse_steps > 0 for turn in turns):
        found.append(f"{method}: {json.dumps([turn.sparse_steps for turn in turns])} sparse steps")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=60, help="requests of a transcript")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0, help="of the results' words")
    given = parser.parse_args(arguments)
    faults: list[str] = []
    print("| method | what the agent did | turns | prompt | new | read | read again, all (most) |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = tool_checkpoint(Path(name))
        for method in given.methods:
            turns = run(folder, method, given.turns, given.seed)
            print(*rows(method, turns), sep="\n", flush=True)
            faults += wrong(method, turns)
    print(*faults, sep="\n", file=sys.stderr, end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
