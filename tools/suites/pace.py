"""How long documents take, from those that are done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tools.compare.run import Job
from tools.suites.prompts.task import Task

CHARACTERS = 3.0  # a token of a local file, about: what counts is how rows compare
STEPS = 1024  # tokens of an answer from which on it counts more than once
Missing = Mapping[str, tuple[str, ...]]  # setup -> labels of methods that have not answered


class Pace:
    """Seconds of documents: those of their task and length, else of their suite, of their length,
    of all, by tokens and by the methods that answer.
    """

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self.seconds: dict[tuple, float] = defaultdict(float)
        self.work: dict[tuple, float] = defaultdict(float)

    def _keys(self, job: Job) -> list[tuple]:
        suite = self.tasks[job.task].suite
        return [(job.task, job.length), (suite, job.length), (job.length,), ()]

    def _work(self, job: Job, missing: Missing) -> float:
        """Tokens of a document, once to be read and once for each answer, more for a long one."""
        task = self.tasks[job.task]
        sizes = task.sizes
        tokens = job.length if sizes is None else min(job.length, sizes[job.number] / CHARACTERS)
        answers = sum(map(len, missing.values())) * job.conversations
        return max(1.0, tokens) * (1 + answers * max(1.0, task.written / STEPS))

    def note(self, job: Job, missing: Missing, seconds: float) -> None:
        """A document has taken so long."""
        for key in self._keys(job):
            self.seconds[key] += seconds
            self.work[key] += self._work(job, missing)

    def expected(self, todo: Iterable[tuple[Job, Missing]]) -> float:
        """Seconds that documents will take; 0 before any is done."""
        total = 0.0
        for job, missing in todo:
            key = next((key for key in self._keys(job) if key in self.work), None)
            if key is not None:
                total += self.seconds[key] / self.work[key] * self._work(job, missing)
        return total
