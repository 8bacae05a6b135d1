"""Scheduler of a batch. Each round runs one batched decode step for all sequences that generate,
then one turn (a prefill chunk) of one other task.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from engine.base.errors import SettingError
from engine.batch.chunking import WaitForTurn
from engine.runner.state import SessionState
from engine.session.results import DecodeRequest
from engine.session.session import Session

Work = Generator[DecodeRequest | WaitForTurn, None, None]


@dataclass(eq=False)
class Task:
    """An answer being generated. work: a generator, resumed when its latest request is met: a
    DecodeRequest once the session has taken the token, a WaitForTurn when the task has its turn.
    """

    session: Session
    work: Work
    wants: DecodeRequest | WaitForTurn | None = None  # None: it has not begun
    length: int = 0  # of the session when it made that request


class Scheduler:
    """Advances tasks. feed: gives a session a token for the next step; take_back: withdraws that
    token; step: runs the step and returns each session's logits, or the exception that ended it.
    """

    def __init__(
        self,
        feed: Callable[[Session, int | None], None],
        take_back: Callable[[Session], None],
        step: Callable[[], dict[SessionState, torch.Tensor | Exception]],
    ) -> None:
        self._feed, self._take_back, self._run_step = feed, take_back, step
        self.tasks: list[Task] = []

    def writing(self, but: Session | None = None) -> bool:
        """Whether any session other than `but` waits for a decode step."""
        return any(isinstance(t.wants, DecodeRequest) and t.session is not but for t in self.tasks)

    def schedule(self) -> list[tuple[Task, Exception | None]]:
        """Run one round. Returns the tasks that ended, each with its exception (None: complete).

        An interrupt ends the task that had its turn; the others continue in the next round.
        """
        ended: list[tuple[Task, Exception | None]] = []
        for task in [task for task in self.tasks if task.wants is None]:
            self._resume(task, ended)
        self._step([task for task in self.tasks if isinstance(task.wants, DecodeRequest)], ended)
        alone = next((task for task in self.tasks if isinstance(task.wants, WaitForTurn)), None)
        if alone is not None:
            # the next turn is another task's
            self.tasks.remove(alone)
            self.tasks.append(alone)
            self._resume(alone, ended)
        return ended

    def end(self, task: Task) -> None:
        """End a task and withdraw its token: an interrupt may have kept the step from taking it."""
        self._take_back(task.session)
        task.work.close()
        if task in self.tasks:
            self.tasks.remove(task)

    def _step(self, tasks: list[Task], ended: list[tuple[Task, Exception | None]]) -> None:
        """Run the decode step that tasks requested, and resume them."""
        for task in tasks:
            # a step that an interrupt followed is not taken again
            if len(task.session) == task.length + 1:
                continue
            assert isinstance(task.wants, DecodeRequest)
            try:
                if len(task.session) != task.length:
                    raise SettingError(
                        f"batch: found the session cut to {len(task.session)} tokens while it "
                        f"wrote an answer, expected {task.length}; stop the answer first"
                    )
                self._feed(task.session, task.wants.token)
            except Exception as error:
                self._fail(task, error, ended)
        try:
            done = self._run_step()
        except Exception as error:  # of no task in particular
            for task in tasks:
                if task in self.tasks:
                    self._fail(task, error, ended)
            return
        for task in tasks:
            found = done.get(task.session)
            if isinstance(found, Exception):
                self._fail(task, found, ended)
            elif len(task.session) == task.length + 1:
                self._resume(task, ended)

    def _resume(self, task: Task, ended: list[tuple[Task, Exception | None]]) -> None:
        """Resume a task until its next request."""
        try:
            task.wants = next(task.work)
            task.length = len(task.session)
        except StopIteration:
            self.tasks.remove(task)
            ended.append((task, None))
        except Exception as error:
            self.tasks.remove(task)
            ended.append((task, error))
        except BaseException:
            self.tasks.remove(task)
            raise

    def _fail(
        self, task: Task, error: Exception, ended: list[tuple[Task, Exception | None]]
    ) -> None:
        self.end(task)
        ended.append((task, error))
