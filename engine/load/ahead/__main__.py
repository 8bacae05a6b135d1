"""One process of engine/load/ahead/children.py: compiles every n-th launch of a first answer.

    python -m engine.load.ahead PART PARTS < (a pickled FirstAnswer, then nothing until the end)

It looks at no GPU: the card is part of what it is told, and Triton is given a driver that knows no
more. What fails to compile is left to the self-test, which says so. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from typing import Any

import torch

from engine.load.ahead.launches import FirstAnswer, launches
from kernels.launch.shapes import Card

NICENESS = 5  # behind whoever reads the weights


class Driver:
    """What Triton's launcher asks of a driver until a kernel is compiled."""

    def __init__(self, card: Card) -> None:
        self._capability = 10 * card.capability[0] + card.capability[1]

    def get_current_device(self) -> int:
        """The card, as if it were here."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Its stream."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def compile_part(answer: FirstAnswer, part: int, parts: int) -> int:
    """Compile every `parts`-th launch from `part` on; how many failed."""
    from triton.runtime.driver import driver

    driver.set_active(Driver(answer.card))
    failed = 0
    for launch in launches(answer)[part::parts]:
        try:
            launch.compile()
        except Exception:
            failed += 1
    return failed


def end_with_parent() -> None:
    """End this process, and the assembler that it runs, when its parent is gone: standard input
    ends then, however the parent ended.
    """
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Exit code 0, also where something did not compile; 2 where nobody who loads started this."""
    if len(arguments) != 2:
        print("engine.load.ahead is started by a load and is no program", file=sys.stderr)
        return 2
    part, parts = map(int, arguments)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    torch.set_num_threads(1)
    answer = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, daemon=True).start()
    compile_part(answer, part, parts)
    return 0


if __name__ == "__main__":
    # a daemon thread that reads standard input must not be waited for
    code = main(sys.argv[1:])
    os._exit(code)
