"""The real model: SmolLM2-135M-Instruct, the checkpoint that judges methods on real text.

`make real-model` fetches, converts and checks it (docs/REAL_MODEL.md); `real_model_folder` is how
tests and tools find it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tools.convert.folder import is_conversion

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPE = "bfloat16"
FOLDER = "OMNIKV_REAL_MODEL"  # the environment variable that names another folder


def real_model_place() -> Path:
    """Where the real model is, or will be: $OMNIKV_REAL_MODEL, else below the user's cache."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "omnikv" / "models" / "smollm2-135m-instruct"


def real_model_folder() -> Path | None:
    """The real model's folder, whole and made of the right file; None where it is absent.

    Looks at the record and the sizes of the files, not into them.
    """
    folder = real_model_place()
    return folder if is_conversion(folder, GGUF_SHA256, DTYPE) else None
