"""The kernels that multiply in tiles of AMX, compiled with the tiles of amx.h in plain C++: any
machine with AVX512-BF16 runs them.
"""

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

from kernels.native import library

TILED = ("amx.cpp", "team.cpp", "tiled_integers.cpp", "tiled_product.cpp", "tiled_prompt.cpp")
FLAGS = ("-w", "-DOMNIKV_AMX_REFERENCE")


def compiled(folder, *sources, change=("", ""), flags=FLAGS):
    """The library of some sources, compiled in `folder`. change: a text of
    amx.h, and what stands in its place there; flags: beside those of AVX512-BF16.
    """
    compiler = library._found_compiler()
    for path in library.FOLDER.glob("*.h"):
        shutil.copy(path, folder)
    header = folder / "amx.h"
    assert change[0] in header.read_text()
    header.write_text(header.read_text().replace(*change))

    def compile_one(name):
        path = folder / name
        if not path.exists():
            shutil.copy(library.FOLDER / name, folder)
        whole = (*library.FLAGS, *library.SETS["avx512_bf16"], *flags)
        done = subprocess.run(
            [compiler, *whole, "-c", str(path), "-o", f"{path}.o"], capture_output=True, text=True
        )
        assert not done.returncode, done.stderr

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources))
    objects = [str(folder / f"{name}.o") for name in sources]
    made = folder / "tiles.so"
    subprocess.run([compiler, "-shared", "-pthread", *objects, "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))
