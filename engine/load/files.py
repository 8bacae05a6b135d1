"""What holds a model: a folder in Hugging Face layout or one GGUF file, read alike.

Both give the configuration, the tokenizer, and the tensors with the way that they are held.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.base.errors import BadCheckpoint
from engine.load.gguf import config as gguf
from engine.load.gguf.vocabulary import Vocabulary, read_vocabulary
from engine.load.options import Options
from engine.model.config.config import MAX_WIDTH, ModelConfig
from engine.model.config.fields import Fields
from engine.model.config.rope_config import MAX_POSITIONS
from engine.model.config.share import Packed
from engine.model.low_bits import GROUP, AsStored, OnTheWay, Rounding
from engine.model.tensors import ignored, targets
from engine.text.tokenizer import Tokenizer, has_tokenizer
from kernels.native.own_pages import empty_on
from weights.checkpoint import Checkpoint
from weights.gguf.blocks import BLOCKS, FORMS
from weights.gguf.header import GGUF, read_header
from weights.gguf.magic import is_gguf
from weights.jsonfile import inside, read_object
from weights.pieces import common
from weights.quantised.checkpoint import QuantisedCheckpoint
from weights.quantised.format import Format
from weights.quantised.formats import format_of

FILE_DTYPE = "bfloat16"  # of activations and bank; a GGUF file names none
WORD = 8  # columns of 4 bits in a word of 32


class ModelFiles(Protocol):
    """What an LLM asks of whatever holds its model."""

    def at(self, path: Path) -> ModelFiles:
        """These files, at a place that now holds all of them."""
        ...

    def config(self, rope: str | None) -> ModelConfig:
        """The configuration; rope overrides its own. Raises as ModelConfig.from_dict."""
        ...

    def rounding(
        self, word: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> Rounding:
        """How `weights=word` holds this model. Raises SettingError."""
        ...

    def tensors(self, config: ModelConfig) -> Any:
        """The tensors, found complete: `stream` reads them. Raises as Checkpoint.require."""
        ...

    def tokenizer(self, config: ModelConfig) -> Tokenizer | None:
        """The tokenizer; None where there is none. Raises BadCheckpoint for ids that the model's
        embedding lacks.
        """
        ...


def model_files(path: Path, sizes: dict[str, Any] | None = None) -> ModelFiles:
    """The files of a model, by what `path` is. sizes: its config.json where there is no file."""
    if sizes is not None:
        return Sizes(path, sizes)
    return File(path) if is_gguf(path) else Folder(path)


class Folder:
    """A folder in Hugging Face layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._format: Format | None = None

    def at(self, path: Path) -> Folder:
        """As ModelFiles."""
        self.path = path
        return self

    def config(self, rope: str | None) -> ModelConfig:
        """As ModelFiles."""
        source = inside(self.path, "config.json")
        self._format = format_of(read_object(source), str(source))
        found = ModelConfig.from_folder(self.path, rope, self._format is not None)
        return found if self._format is None else replace(found, packed=packed_of(self._format))

    def rounding(
        self, word: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> Rounding:
        """As ModelFiles."""
        if self._format is None:
            return OnTheWay.of(word, config, device.type != "cpu" or backend == "triton")
        found = self.tensors(config)
        assert isinstance(found, QuantisedCheckpoint)
        said = self._format.described
        return AsStored.of(found.forms(targets(config)), word, dtype, device, backend, said)

    def tensors(self, config: ModelConfig) -> Checkpoint | QuantisedCheckpoint:
        """As ModelFiles."""
        found: Checkpoint | QuantisedCheckpoint = (
            Checkpoint.open(self.path, empty_on)
            if self._format is None
            else QuantisedCheckpoint(self.path, self._format)
        )
        found.require(targets(config), ignored(config))
        return found

    def tokenizer(self, config: ModelConfig) -> Tokenizer | None:
        """As ModelFiles."""
        if not has_tokenizer(self.path):
            return None
        return fitting(Tokenizer(self.path), config)


class Sizes(Folder):
    """A model of which the sizes alone are known: enough to plan its float weights."""

    def __init__(self, path: Path, sizes: dict[str, Any]) -> None:
        super().__init__(path)
        self.sizes = sizes

    def config(self, rope: str | None) -> ModelConfig:
        """As ModelFiles."""
        return ModelConfig.from_dict(self.sizes, str(self.path), rope=rope)


class File:
    """A GGUF file. Its header is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header: GGUF | None = None
        self._words: Vocabulary | None = None

    def at(self, path: Path) -> File:
        """As ModelFiles."""
        return self

    def _read(self) -> tuple[GGUF, Vocabulary]:
        if self._header is None or self._words is None:
            self._header = read_header(self.path)
            fields = Fields(self._header.keys, str(self.path))
            key = gguf.architecture(fields) + ".context_length"
            context = fields.integer(key, 1, MAX_POSITIONS)
            self._words = read_vocabulary(self._header.keys, str(self.path), context)
        return self._header, self._words

    def config(self, rope: str | None) -> ModelConfig:
        """As ModelFiles."""
        found = gguf.read_config(*self._read(), FILE_DTYPE, rope)[1]
        kinds = {tensor.kind for tensor in self._read()[0].tensors.values()} & FORMS.keys()
        if not kinds:
            return found
        group = common((GROUP, *(FORMS[kind].group for kind in kinds)))
        block = common(BLOCKS[kind][0] for kind in kinds)
        return replace(found, packed=Packed(group, block))

    def rounding(
        self, word: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> Rounding:
        """As ModelFiles."""
        forms = self.tensors(config).forms(targets(config))
        kinds = sorted({t.kind for t in self._read()[0].tensors.values() if len(t.shape) == 2})
        return AsStored.of(forms, word, dtype, device, backend, "GGUF " + "/".join(kinds))

    def tensors(self, config: ModelConfig) -> Any:
        """As ModelFiles."""
        return gguf.checkpoint(self._read()[0], config)

    def tokenizer(self, config: ModelConfig) -> Tokenizer | None:
        """As ModelFiles."""
        words = self._read()[1]
        return fitting(Tokenizer.of(self.path, words.tokenizer, words.settings), config)


def packed_of(format: Format) -> Packed:
    """How a format's columns go together, where they may be held in groups of GROUP. Where a row
    has one scale and is held so, whole words are cut.
    """
    form = format.form((1, MAX_WIDTH))
    if form.group >= MAX_WIDTH and (
        form.kind == "int4" or form.kind == "int8" and not form.offsets
    ):
        return Packed(2, WORD)
    group = GROUP if form.group >= MAX_WIDTH else common((form.group, GROUP))
    return Packed(group, group, form.permuted)


def rounding(
    files: ModelFiles | None,
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Rounding:
    """Return the form of a model's weights. files: None for float weights from a stream."""
    if files is None:
        grouped = device.type != "cpu" or options.backend == "triton"
        return OnTheWay.of(options.weights, config, grouped)
    return files.rounding(options.weights, config, dtype, device, options.backend)


def fitting(tokenizer: Tokenizer, config: ModelConfig) -> Tokenizer:
    """Return the tokenizer; raises BadCheckpoint where it has ids beyond the embedding."""
    if tokenizer.vocab_max_id >= config.vocab_size:
        raise BadCheckpoint(
            f"{tokenizer.path}: found token id {tokenizer.vocab_max_id}, expected ids below "
            f"{config.vocab_size} (the embedding's rows)"
        )
    return tokenizer
