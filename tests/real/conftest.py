"""Tests of the real model: skipped where it is absent."""

from pathlib import Path

import pytest

from tools.real_model import real_model_folder


@pytest.fixture(scope="session")
def real() -> Path:
    """The real model's folder."""
    folder = real_model_folder()
    if folder is None:
        pytest.skip("the real model is absent: make real-model")
    return folder
