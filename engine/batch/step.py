"""One decode step for several sessions: every weight is read once for all of them.

Linear layers run on the rows of all sequences together. Rows, rotation, selection and attention
stay each session's own, over its own bank, so that nothing of one can reach another.

On a GPU the whole step is one CUDA graph for each set of sessions and their buckets. A set that has
just come together runs eagerly for a few steps: sessions join and leave more often than a capture
pays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.forward.decode import step_together
from engine.forward.graphs import Captured, bucket_for, captured
from engine.forward.split.layers import torch_layer
from engine.runner.step import DecodeStep
from engine.runner.step_runner import StepRunner

PATIENCE = 4  # steps of a set before it is captured
MOST_GRAPHS = 32  # sets that are kept; each holds its activations and logits

Parts = tuple[tuple["StepRunner", bool, int], ...]  # (runner, whether its own step, bucket) of each


class BatchedStep:
    """Runs one decode step for several sessions of an LLM. All of them must be batchable and on the
    same backend.
    """

    def __init__(self) -> None:
        self._graphs: dict[Parts, Captured] = {}
        self._last: Parts = ()
        self._seen = 0  # steps of the latest set

    def run(self, steps: Sequence[DecodeStep]) -> torch.Tensor:
        """Run prepared steps: float32 logits [sessions, vocab]."""
        parts = tuple(
            (
                step.session.runner,
                step.kind.own,
                bucket_for(step.n, step.session.bank.capacity),
            )
            for step in steps
        )
        if not parts[0][0].joint_graphs or not all(
            runner.step_of(own).captures for runner, own, _ in parts
        ):
            return self._together(parts, whole=True)[0]
        self._note(parts)
        if parts not in self._graphs and self._seen < PATIENCE:
            return self._together(parts)[0]
        if parts not in self._graphs:
            device = parts[0][0].token.device
            self._graphs[parts] = captured(device, lambda: self._together(parts))
        graph, logits = self._graphs[parts]
        graph.replay()
        parts[0][0].model.replayed()
        return logits[0].clone()

    def forget(self, runners: set[StepRunner]) -> None:
        """Drop the graphs of all runners but these: the others' tensors are freed."""
        self._graphs = {
            parts: graph
            for parts, graph in self._graphs.items()
            if all(runner in runners for runner, _, _ in parts)
        }
        if any(runner not in runners for runner, _, _ in self._last):
            self._last, self._seen = (), 0

    def _note(self, parts: Parts) -> None:
        """Count the steps of a set, and keep the most recently used graphs."""
        self._seen = self._seen + 1 if parts == self._last else 1
        self._last = parts
        if parts in self._graphs:
            self._graphs[parts] = self._graphs.pop(parts)
        elif len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _together(self, parts: Parts, whole: bool = False) -> torch.Tensor:
        """Run the step eagerly: logits [1, sessions, vocab]. whole: kernels may read all rows."""
        sequences = [
            runner.step_of(own).sequence_step(None if whole else bucket)
            for runner, own, bucket in parts
        ]
        runner = parts[0][0]
        halves = runner.halves
        if len(sequences) > halves.most_rows:
            halves = torch_layer(runner.model)
        return step_together(runner.model, halves, sequences)
