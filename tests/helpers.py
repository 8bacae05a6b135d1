"""Helpers that several test files share."""

import json
from pathlib import Path

import pytest

SHARED_MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"


def shared_model(name: str) -> Path:
    """The folder of a development checkpoint beside the project, or a skip where there is none."""
    folder = SHARED_MODELS / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs the development checkpoint {folder}")
    return folder


def word_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer.json of `size` words "w0" .. in a model folder; id 1 begins, id 2 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
