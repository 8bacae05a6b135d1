"""Helpers that several test files share."""

from pathlib import Path

import pytest

SHARED_MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"


def shared_model(name: str) -> Path:
    """The folder of a development checkpoint beside the project, or a skip where there is none."""
    folder = SHARED_MODELS / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs the development checkpoint {folder}")
    return folder
