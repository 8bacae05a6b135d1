"""GraphWalks (OpenAI, 2025, huggingface.co/datasets/openai/graphwalks, MIT): a directed graph as a
list of edges, and the nodes at a distance from one of them (bfs), or with an edge to it (parents).

The generator was not published. Ours draws nodes of ten hexadecimal digits with two edges each on
average. Distances are shortest ones and the prompt says so: the first prompt left it open whether a
node that is reached again counts. The first published way to read a list kept words of the line
with its first node, and gave 1 for a wrong answer; neither is followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from engine.text.tokenizer import Tokenizer
from tools.suites.metrics.matches import nodes_named
from tools.suites.prompts.fitting import fitted, fresh
from tools.suites.prompts.instance import Instance, asked_once
from tools.suites.prompts.task import Prompt, Task

WRITTEN = 256
MOST = 12  # nodes of an answer
DEEPEST = 4  # steps of a search
TRIES = 200  # nodes to ask about before a smaller answer is taken
# in the words of the dataset (MIT), but for the distance
BEFORE = (
    "You will be given a graph as a list of directed edges. All nodes are at least degree 1. You "
    "will also get a description of an operation to perform on the graph.\nYour job is to execute "
    "the operation on the graph and return the set of nodes that the operation results in. If "
    "asked for a breadth-first search (BFS), only return the nodes whose shortest distance from "
    "the starting node is exactly that depth, do not return the starting node. If asked for the "
    "parents of a node, only return the nodes that have an edge leading to the given node, do not "
    "return the given node itself.\n\nHere is an example:\n<begin example>\nThe graph has the "
    "following edges:\nuvwx -> alke\nabcd -> uvwx\nabcd -> efgh\nefgh -> uvwx\n\nExample 1:\n"
    "Operation:\nPerform a BFS from node abcd with depth 1.\nFinal Answer: [uvwx, efgh]\n\n"
    "Example 2:\nOperation:\nPerform a BFS from node alke with depth 1.\nFinal Answer: []\n\n"
    "Example 3:\nOperation:\nFind the parents of node uvwx.\nFinal Answer: [abcd, efgh]\n\n"
    "Example 4:\nOperation:\nFind the parents of node abcd.\nFinal Answer: []\n<end example>\n\n"
    "Here is the graph to operate on:\nThe graph has the following edges:\n"
)
BEHIND = (
    "\n\nYou should immediately return the set of nodes that the operation results in, with no "
    "additional text. Return your final answer as a list of nodes in the very last line of your "
    'response. For example, if the answer is nodes a and b: "Final Answer: [a, b]".'
)
DIFFERS = (
    "GraphWalks' graphs are our own (its generator was not published): two edges a node, answers "
    f"of 1 to {MOST} nodes, depths 1 to {DEEPEST}; a node's distance is its shortest",
)
Graph = dict[str, list[str]]


@dataclass(frozen=True)
class Walks:
    """parents: who has an edge to a node, instead of what lies at a distance. pieces: edges."""

    parents: bool

    least = 12

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt; its edges are different ones, in no order."""
        made: set[str] = set()
        nodes = [fresh(made, lambda: f"{rng.getrandbits(40):010x}") for _ in range(pieces // 2)]
        edges: set[tuple[str, str]] = set()
        for place in range(pieces):  # a node's first edge goes out of it, so that none is alone
            start = nodes[place] if place < len(nodes) else rng.choice(nodes)
            end = rng.choice(nodes)
            while end == start or (start, end) in edges:
                start, end = start if place < len(nodes) else rng.choice(nodes), rng.choice(nodes)
            edges.add((start, end))
        listed = sorted(edges)
        rng.shuffle(listed)
        question, found = self._asked(rng, nodes, listed)
        lines = [f"{start} -> {end}" for start, end in listed]
        context = "\n".join(lines)
        return Instance(BEFORE, context, f"\n\nOperation:\n{question}{BEHIND}", "", sorted(found))

    def _asked(
        self, rng: Random, nodes: list[str], edges: list[tuple[str, str]]
    ) -> tuple[str, set[str]]:
        """(the operation, the nodes that it results in), of which there are 1 to MOST."""
        after: Graph = {}
        before: Graph = {}
        for start, end in edges:
            after.setdefault(start, []).append(end)
            before.setdefault(end, []).append(start)
        deepest = 1 if self.parents else rng.randint(1, DEEPEST)
        for tried in range(TRIES * DEEPEST):
            node, depth = rng.choice(nodes), max(1, deepest - tried // TRIES)
            found = set(before.get(node, [])) if self.parents else at_distance(after, node, depth)
            if 1 <= len(found) <= MOST:
                break
        if self.parents:
            return f"Find the parents of node {node}.", found
        return f"Perform a BFS from node {node} with depth {depth}.", found


def at_distance(after: Graph, node: str, depth: int) -> set[str]:
    """Nodes whose shortest way from a node has so many edges. after: {node: those behind it}."""
    seen, edge = {node}, {node}
    for _ in range(depth):
        edge = {each for one in edge for each in after.get(one, [])} - seen
        seen |= edge
    return edge


WALKS = {"bfs": Walks(False), "parents": Walks(True)}


def task(name: str, seed: int) -> Task:
    """A task of GraphWalks."""
    make = partial(_prompt, name, seed)
    return Task("graphwalks", f"graphwalks/{name}", WRITTEN, make, differs=DIFFERS)


def _prompt(
    name: str, seed: int, tokenizer: Tokenizer, length: int, number: int, room: int
) -> Prompt:
    walks = WALKS[name]
    found = fitted("graphwalks", name, walks, WRITTEN, length, number, tokenizer, seed)
    return asked_once(tokenizer, found, partial(nodes_named, expected=found.answers))
