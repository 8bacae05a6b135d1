"""The engine's version, and those of its libraries without importing them: torch takes seconds."""

from __future__ import annotations

import platform
from importlib import metadata

VERSION = "0.1.0"
LIBRARIES = ("torch", "triton", "tokenizers", "safetensors")


def versions() -> str:
    """Return one line of versions for bug reports."""
    found = []
    for package in LIBRARIES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return (
        f"omnikv-engine {VERSION} (python {platform.python_version()}, {', '.join(found)}, "
        f"{platform.system()} {platform.machine()})"
    )
