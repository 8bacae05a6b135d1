"""Weights in few bits: which tensors of a model are held how, made while they stream, and counted
before that.

`OnTheWay` rounds float weights. `AsStored` keeps those of a checkpoint that comes quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from engine.model.share.divide import whole_of
from engine.model.tensors import targets
from kernels.launch.dispatch import ON_CPU
from kernels.quant.linear import GROUPED, GROUPS, choose_quantised_form, held_bytes, speed_note
from kernels.quant.matrix import Quantised, joined
from kernels.quant.native import held_as_panels, usable
from kernels.quant.rounding import few_mantissa_bits_to_int8, to_int4, to_int8
from kernels.quant.torch_forms.int4_tiles import tile_rows
from kernels.quant.words import held_as_words
from weights.mxfp4 import COLUMNS
from weights.quantised.stored import Form, Stored

GROUP = 32  # columns under one scale of int4, unless its word says more (docs/QUANTISATION.md)
GPU_GROUP = 64  # of int8 on a GPU, where outliers have no product
OUTLIER_SHARE = 32  # without a compiler one weight in so many is left out of its row's int8 scale
MATRICES = ("qkv", "queries", "o", "gate", "gate_up", "down", "lm_head")


@dataclass(frozen=True)
class Held:
    """The storage format of one matrix."""

    kind: str
    group: int  # columns under one scale
    offsets: bool = False  # each group has an offset
    outliers: int = 0  # of each row, stored apart
    scale_bytes: int | None = None  # of one scale as stored; None: see held_bytes
    permuted: bool = False  # the input columns are permuted
    table: bool = False  # values are entries of a table

    def form(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, backend: str
    ) -> str:
        """The product that runs with a backend."""
        if backend == "triton":
            plain = not self.table and not self.outliers
            words = held_as_words(self.kind, self.group, shape[1], plain)
            return "words" if words else "blocks"
        if backend not in ON_CPU:
            return "blocks"
        plain = not self.table and not (self.kind == "int8" and self.offsets and self.whole(shape))
        apart = self.outliers > 0
        return choose_quantised_form(self.kind, shape, self.group, dtype, device, plain, apart)

    def whole(self, shape: tuple[int, int]) -> bool:
        """Whether a row has one scale."""
        return self.group >= shape[1]

    def bytes(self, shape: tuple[int, int], form: str) -> int:
        """Bytes of a matrix [O, I] in a form."""
        size = held_bytes(
            self.kind, shape, self.group, self.offsets, form, self.outliers, self.scale_bytes
        )
        return size + (8 * shape[1] if self.permuted else 0) + (64 if self.table else 0)


class FewBits(NamedTuple):
    """Weights of a model as they are held. note: a line for the plan; read: bytes that a step
    reads, without a table of embeddings that is no last product; kind: "int4" where a matrix of a
    layer is, else "int8".
    """

    nbytes: int
    note: str
    read: int
    kind: str


class Rounding(Protocol):
    """What a load asks about weights in few bits."""

    def stream(self, weights: Iterable[tuple[str, Any]], tied: bool) -> Iterator[tuple[str, Any]]:
        """Turn (target name, what is stored) into (target name, tensor or Quantised)."""
        ...

    def bytes(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> FewBits | None:
        """Count the weights' bytes as they will be held, and say how; None for floats as stored.

        backend: with one that is forced everything is dequantised in blocks, but for "triton".
        """
        ...

    def of_part(self, config: ModelConfig, first: int) -> Rounding:
        """The same of a part of a model's layers, the one that begins with layer `first`, whose
        targets are numbered from 0 and whose tied lm_head has memory of its own. config: of all.
        """
        ...


@dataclass(frozen=True)
class OnTheWay:
    """Float weights that are rounded as they arrive.

    kind: "auto" or "float" (as they are), "int8" (as `whole_bytes` says) or "int4" (groups of
    `group` columns; lm_head int8 as ever). Embeddings, norms and biases stay as they are. mxfp4:
    experts that are stored so come to lie in int8, in groups of COLUMNS, as the same values.
    """

    kind: str
    group: int
    gpu: bool = False
    mxfp4: bool = False

    @classmethod
    def of(cls, word: str, config: ModelConfig, gpu: bool = False) -> OnTheWay:
        """What `weights=word` means for a model.

        word: "auto", "float", "int8", "int4", or "int4:N" for groups of N columns. Raises
        SettingError where the groups do not divide the rows.
        """
        kind, _, columns = word.partition(":")
        group = int(columns or GROUP)
        by_rows = config.share is not None and config.share.output is not None
        inputs = whole_of(config).value_size if by_rows else config.value_size
        widths = {config.hidden_size, inputs}
        if config.latent and config.latent.query_rank:
            widths.add(config.latent.query_rank)
        if config.experts is None or config.experts.dense:
            widths.add(config.intermediate_size)
        if config.experts is not None:
            widths |= {config.experts.width, config.experts.shared or config.experts.width}
        if config.recurrent is not None:
            widths.add(config.recurrent.value_size)
        width = next((width for width in sorted(widths) if width % group), None)
        if kind == "int4" and width is not None:
            instead = "int4" if all(width % GROUP == 0 for width in widths) else "int8"
            raise SettingError(
                f"weights: found {word!r}, but rows of {width} are no multiple of its groups of "
                f"{group}; use weights={instead!r}"
            )
        # on a GPU int8 of such groups has no product of its own
        packed = config.experts is not None and config.experts.stored == "mxfp4"
        exact = kind == "auto" and packed and not gpu
        return cls(kind, group if kind == "int4" else 0, gpu, exact)

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded at all."""
        return self.kind in ("int8", "int4")

    def held(self, name: str, columns: int) -> Held | None:
        """How the matrix of a target is held; None: as it is stored."""
        part = name.split(".")[-1]
        if self.mxfp4 and ".experts." in name and part in MATRICES:
            return Held("int8", COLUMNS)
        if not self.rounds or part not in MATRICES:
            return None
        if self.kind == "int4" and part != "lm_head":
            return Held("int4", self.group, True)
        return whole_bytes(columns, self.gpu)

    def stream(self, weights: Iterable[tuple[str, Any]], tied: bool) -> Iterator[tuple[str, Any]]:
        """Round each matrix of (target name, tensor) pairs as it comes. A tied embedding comes
        twice: as it is, and rounded as lm_head.
        """
        for name, tensor in weights:
            if name == "embed":
                yield name, tensor
                held = self.held("lm_head", tensor.shape[-1]) if tied else None
                if held is not None:
                    yield "lm_head", rounded(tensor, held)
                continue
            held = self.held(name, tensor.shape[-1]) if tensor.dim() == 2 else None
            if self.mxfp4 and held is not None:
                yield name, few_mantissa_bits_to_int8(tensor, held.group)
            else:
                yield name, tensor if held is None else rounded(tensor, held)
            del tensor

    def bytes(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> FewBits | None:
        """As Rounding.bytes."""
        if not self.rounds and not self.mxfp4:
            return None
        counts = kinds_of(config)
        if config.tied_embeddings and not self.mxfp4:
            (embed,) = (shape for name, shape in counts if name == "embed")
            counts = {**counts, ("lm_head", embed): 1}
        shapes = dict(counts.keys())
        held = {name: self.held(name, shape[-1]) for name, shape in shapes.items()}
        said = f"int4, groups of {self.group}, " if self.kind == "int4" else "int8, "
        if self.mxfp4:
            said = "experts in int8 with the values of their MXFP4, "
        times = {name: count for (name, _), count in counts.items()}
        return _counted(config, shapes, held, dtype, device, backend, said, times)

    def of_part(self, config: ModelConfig, first: int) -> Rounding:
        """As Rounding: matrices go by the last part of their names."""
        return self


def whole_bytes(columns: int, gpu: bool) -> Held:
    """int8 as float weights are rounded to it: groups of GPU_GROUP on a GPU and of GROUP in the C++
    products, where they divide; else one scale per row, on a CPU with a few outliers.
    """
    if gpu:
        return Held("int8", GPU_GROUP if columns % GPU_GROUP == 0 else columns)
    if usable() and columns % GROUP == 0:
        return Held("int8", GROUP)
    return Held("int8", columns, outliers=columns // OUTLIER_SHARE)


def rounded(weight: torch.Tensor | Quantised, held: Held) -> Quantised:
    """Round a matrix as `held` says."""
    if held.kind == "int4":
        assert isinstance(weight, torch.Tensor)
        return to_int4(weight, held.group)
    columns = int(weight.shape[1])
    narrow = held.scale_bytes is None and held.group < columns
    dtype = torch.bfloat16 if narrow else torch.float32
    return to_int8(weight, min(held.group, columns), held.outliers, dtype)


@dataclass(frozen=True)
class AsStored:
    """A checkpoint that comes quantised.

    forms: target name -> the form of each of its parts, None for floats. word: "auto" keeps what is
    stored, as far as this device multiplies it: on a CPU tables, fp8, short groups and parts of
    different kinds become int8 in groups of GROUP. "float" dequantises everything, "int8" rounds
    again, with one scale per row. described: the format, for people. plain: a backend is forced, so
    everything stays as it is. tables: what is held as an embedding is: with lm_head, whose
    values are the same, both are held as for products.
    """

    forms: Mapping[str, tuple[Form | None, ...]]
    word: str
    dtype: torch.dtype
    gpu: bool
    plain: bool
    described: str
    tables: tuple[str, ...] = ("embed",)

    @classmethod
    def of(
        cls,
        forms: Mapping[str, tuple[Form | None, ...]],
        word: str,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        described: str,
    ) -> AsStored:
        """What `weights=word` means for a checkpoint. Raises SettingError for "int4"."""
        if word.startswith("int4"):
            raise SettingError(
                f"weights: found {word!r}, but the checkpoint is quantised already ({described}); "
                "use auto, float or int8"
            )
        plain = backend not in ON_CPU
        return cls(forms, word, dtype, device.type != "cpu", plain, described)

    def held(self, name: str, shape: tuple[int, ...]) -> Held | None:
        """How a target is held; None for floats."""
        forms = self.forms.get(name, (None,))
        if self.word == "float" or len(shape) != 2 or not any(forms):
            return None
        if name.split(".")[-1] not in (*MATRICES, *self.tables):
            return None  # of a router and its like: few weights, multiplied as floats
        first, columns = forms[0], shape[1]
        if self.word == "int8" and name != "embed":
            return whole_bytes(columns, self.gpu)
        alike = first is not None and all(form == first for form in forms)
        if alike and first is not None and name not in self.tables and self._dealt(first, columns):
            return Held("int8", GROUP, True, scale_bytes=4, permuted=first.permuted)
        if alike and first is not None and (name in self.tables or self._kept(first, shape)):
            group = min(first.group, columns)
            tiled = not self.gpu and not self.plain and not _native(first, columns)
            while tiled and group > GROUPS[-1] and columns % group == 0:
                if group % 2 or first.kind != "int4":
                    break
                group //= 2  # the same scale for both halves
            return Held(
                first.kind,
                group,
                first.offsets,
                scale_bytes=4,
                permuted=first.permuted,
                table=first.table,
            )
        if columns % GROUP:
            return whole_bytes(columns, self.gpu)
        return Held("int8", GROUP)

    def _dealt(self, form: Form, columns: int) -> bool:
        """Whether a row's one scale and offset are dealt out to groups of GROUP, as bytes with an
        offset for a whole row have no product.
        """
        whole = form.kind == "int8" and form.offsets and form.group >= columns
        here = not self.gpu and not self.plain and usable()
        return here and whole and columns % GROUP == 0

    def _kept(self, form: Form, shape: tuple[int, ...]) -> bool:
        """Whether this device multiplies a form as it is stored."""
        if self.gpu or self.plain:
            return True
        if form.table or form.kind == "fp8":
            return False
        if form.kind == "int8" and form.group >= shape[1]:
            return not form.offsets
        if _native(form, shape[1]):
            return True
        rows = tile_rows()
        tiled = not rows or shape[0] % rows == 0
        group = form.group
        while form.kind == "int4" and group > GROUPS[-1] and group % 2 == 0:
            group //= 2
        return tiled and group in GROUPS and shape[1] % group == 0

    def stream(self, weights: Iterable[tuple[str, Any]], tied: bool) -> Iterator[tuple[str, Any]]:
        """Turn (target name, list of its parts, each a tensor or Stored) into matrices. A tied
        embedding that is quantised is lm_head too; with word "int8" lm_head is a copy of its own.
        """
        for name, parts in weights:
            rows = sum(int((p.values if isinstance(p, Stored) else p).shape[0]) for p in parts)
            made = [Quantised(*p) if isinstance(p, Stored) else p for p in parts]
            del parts
            shape = (rows, *made[0].shape[1:])
            held = self.held(name, shape)
            if held is None:
                tensors = [m.dense(self.dtype) if isinstance(m, Quantised) else m for m in made]
                yield name, tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                continue
            whole = self._whole(made, held)
            del made
            if name == "embed" and tied and self.word == "int8":
                yield "lm_head", rounded(whole, whole_bytes(shape[1], self.gpu))
            yield name, whole
            del whole

    def _whole(self, parts: list[Any], held: Held) -> Quantised:
        """One matrix of the parts, in the form that was planned."""
        same = [
            p
            for p in parts
            if isinstance(p, Quantised) and p.kind == held.kind and p.group >= held.group
            if (p.offsets is not None, p.table is not None) == (held.offsets, held.table)
            if (p.permutation is not None) == held.permuted and held.scale_bytes
        ]
        if len(same) == len(parts):
            found = joined([_regrouped(p, held.group) for p in same])
            assert found is not None
            return found
        found = joined([rounded(part, held) for part in parts])
        assert found is not None
        return found

    def bytes(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> FewBits | None:
        """As Rounding.bytes."""
        if self.word == "float":
            return None
        shapes = shapes_of(config)
        held = {name: self.held(name, shape) for name, shape in shapes.items()}
        if config.tied_embeddings and held["embed"] is not None and self.word == "int8":
            shapes["lm_head"] = shapes["embed"]
            held["lm_head"] = whole_bytes(shapes["embed"][-1], self.gpu)
        said = f"{self.described}, "
        packed = "lm_head" in self.tables
        return _counted(config, shapes, held, dtype, device, backend, said, packed=packed)

    def of_part(self, config: ModelConfig, first: int) -> Rounding:
        """As Rounding: the forms by the part's numbers. A tied lm_head is held as the embedding."""
        forms = {}
        for name, form in self.forms.items():
            number, dot, rest = name.partition(".")
            own = f"{int(number) - first}.{rest}" if dot and number.isdecimal() else name
            forms[own] = form
        if not config.tied_embeddings or self.word == "int8":
            return replace(self, forms=forms)
        forms["lm_head"] = forms.get("embed", (None,))
        return replace(self, forms=forms, tables=(*self.tables, "lm_head"))


def _native(form: Form, columns: int) -> bool:
    """Whether the C++ products take a form as it is stored. int8 in groups shorter than GROUP would
    be a third larger than its file.
    """
    long = form.kind == "int4" or form.group >= GROUP
    plain = not form.table
    return long and held_as_panels(form.kind, form.group, columns, plain) and usable()


def _regrouped(weight: Quantised, group: int) -> Quantised:
    """The same matrix with shorter groups, each with its scale of before."""
    times = weight.group // group
    if times == 1:
        return weight
    offsets = None if weight.offsets is None else weight.offsets.repeat_interleave(times, 1)
    scales = weight.scales.repeat_interleave(times, 1)
    return replace(weight, scales=scales, offsets=offsets, group=group)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{target name: shape} of a model's tensors as the engine holds them."""
    return {target.name: target.shape for target in targets(config)}


def kinds_of(config: ModelConfig) -> dict[tuple[str, tuple[int, ...]], int]:
    """{(name of the first, shape): how many} of the tensors that an OnTheWay holds alike: those of
    one shape and one last part of their name, experts apart. A mixture has tens of thousands, of
    which one expert of each layer is looked at.
    """
    return _kinds_of(replace(config, bank="model"))


@lru_cache(maxsize=128)  # the models of --list-models --fits
def _kinds_of(config: ModelConfig) -> dict[tuple[str, tuple[int, ...]], int]:
    first: dict[tuple[str, bool, tuple[int, ...]], str] = {}
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    alike = config.experts.count if config.experts else 1
    for target in targets(config, first_experts=1):
        of_expert = ".experts." in target.name
        kind = target.name.rpartition(".")[2], of_expert, target.shape
        one = first.setdefault(kind, target.name), target.shape
        counts[one] = counts.get(one, 0) + (alike if of_expert else 1)
    return counts


def _counted(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Held | None],
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    said: str,
    times: Mapping[str, int] | None = None,
    packed: bool = False,
) -> FewBits:
    """Count all tensors: `held` says how; what it does not is in `dtype`. times: how many there are
    of each, where `shapes` names one for all. packed: the embedding is held as for products.
    """
    sizes: dict[str, int] = {}
    forms: dict[str, str] = {}
    shared_table = config.tied_embeddings and "lm_head" not in held
    for name, shape in shapes.items():
        one = held.get(name)
        if one is None or len(shape) == 1:
            sizes[name] = math.prod(shape) * dtype.itemsize
            continue
        pair, form = (shape[0], shape[1]), "blocks"
        shared = name == "embed" and (shared_table or packed)
        if name != "embed" or shared:
            form = one.form(pair, dtype, device, backend)
        sizes[name] = one.bytes(pair, form)
        if name.split(".")[-1] not in ("lm_head", "embed"):
            forms[GROUPED if one.kind == "int8" and not one.whole(pair) else one.kind] = form
    note = f"{config.parameters / 1e9:.2f} B parameters, {said}{_how(forms, device)}"
    total = sum(size * (times or {}).get(name, 1) for name, size in sizes.items())
    read = total - (0 if shared_table else sizes.get("embed", 0))
    return FewBits(total, note, read, "int4" if "int4" in forms else "int8")


def _how(forms: dict[str, str], device: torch.device) -> str:
    said = {"words": "dequantised in registers", "blocks": "dequantised in blocks"}
    if device.type != "cpu" or "words" in forms.values():
        return "; ".join(dict.fromkeys(said[form] for form in forms.values()))
    return "; ".join(speed_note(kind, form) for kind, form in forms.items())
