"""Some sources of the C++ kernels as another instruction set's compiler makes them: all of them
take a minute.
"""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from kernels.native import library


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="omnikv-parts-")


@functools.cache
def part(name, *sources):
    """A library of these sources, and of the team of threads, for an instruction set."""
    path = Path(_folder().name) / f"{name}-{'-'.join(sources)}.so"
    flags = *library.FLAGS, *library._FLAGS_OF[name]
    files = (str(library.FOLDER / source) for source in (*sources, "team.cpp"))
    command = [library._found_compiler(), *flags, "-shared", *files, "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(path))
