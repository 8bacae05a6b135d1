"""The child process that tries a tokenizer's expressions (see engine/text/sandbox/expressions.py).

It imports nothing of the engine. Run it as a script; standard input is JSON, [path of a
tokenizer.json, texts]. Exit code 0: all texts were encoded. 1: the library panicked, and standard
output says why. An error that is no panic is the parent's to find.
"""

from __future__ import annotations

import sys

# Python puts a script's folder first on the path: its files must not shadow packages
sys.path.pop(0)

import contextlib  # noqa: E402
import json  # noqa: E402

import tokenizers  # noqa: E402

MEMORY_BYTES = 4 << 30  # of address space; a vocabulary of 256,000 takes less than 1
CPU_SECONDS = 20


def confine() -> None:
    """Bound this process's memory and time, as far as the system can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    """Encode every text."""
    confine()
    path, texts = json.load(sys.stdin)
    try:
        backend = tokenizers.Tokenizer.from_file(path)
        for text in texts:
            backend.encode(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            return 0
        print(str(error).splitlines()[0][:120] if str(error) else "a panic")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
