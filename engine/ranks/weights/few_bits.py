"""Whether the weights of few bits that a rank holds are those of one process."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from engine.model.low_bits import AsStored, Held, OnTheWay, Rounding
from engine.model.share.cut import cut_columns
from engine.model.share.divide import whole_of
from engine.model.tensors import targets
from kernels.quant.torch_forms.rounded_rows import GROUP
from weights.quantised.stored import Form


def require_whole_groups(config: ModelConfig, rounding: Rounding, word: str, ranks: int) -> None:
    """Raise SettingError for weights of few bits that a cut would make others than one process's:
    of rows with a scale for columns on both sides of it, or of columns in an order of their own.
    config: of a rank; word: as asked for.
    """
    assert isinstance(rounding, OnTheWay | AsStored)
    forms = rounding.forms if isinstance(rounding, AsStored) else {}
    wholes = {target.name: target.shape for target in targets(whole_of(config))}
    for target in targets(config):
        own, whole = target.shape, wholes[target.name]
        if own == whole or len(own) != 2:
            continue
        mine, theirs = (_held(rounding, target.name, shape) for shape in (own, whole))
        for left, right, columns in cut_columns(target) or [(0, own[1], own[1])]:
            stored = [form for form in forms.get(target.name, ()) if form is not None]
            wrong = next((f for f in stored if not _cuts(f.group, left, right, columns)), None)
            permuted = any(form.permuted for form in stored) and right - left < columns
            if wrong is None and not permuted and _alike(mine, theirs, left, right, columns):
                continue
            full = right - left == columns or _parted(theirs, wrong, permuted, left, right, columns)
            if full and mine is not None and theirs is not None:
                here, one = (f"{held.kind} in groups of {held.group}" for held in (mine, theirs))
                raise SettingError(
                    f"weights: found {word!r} with {ranks} ranks, but {target.name} would be held "
                    f"as {here}, and in one process as {one}: this machine's products take other "
                    "numbers of rows or groups; use float weights with weights='auto'"
                )
            group = wrong.group if wrong is not None else _group(mine, theirs)
            size = "a row" if group >= columns else f"{group} columns"
            size += ", outliers apart" if theirs is not None and theirs.outliers else ""
            size += " in an order of its own" if permuted else ""
            raise SettingError(
                f"weights: found {word!r} with {ranks} ranks, but {target.name} has a scale for "
                f"{size}, which a cut at columns {left} to {right} divides; use float weights with "
                "weights='auto'"
            )


def require_whole_steps(config: ModelConfig, ranks: int) -> None:
    """Raise SettingError where a rank's columns are no whole groups of those that one process
    rounds together, so that its activations in 8 bits would be others. config: of a rank.
    """
    for target in targets(config):
        for left, right, columns in cut_columns(target):
            if left % GROUP == 0 and (right % GROUP == 0 or right == columns):
                continue
            raise SettingError(
                f"activations: found 'int8' with {ranks} ranks, but {target.name} is cut at "
                f"columns {left} to {right}, which divides {GROUP} that are rounded together; "
                "expected 'auto'"
            )


def _held(rounding: OnTheWay | AsStored, name: str, shape: tuple[int, ...]) -> Held | None:
    """How a matrix of a target is held."""
    if isinstance(rounding, AsStored):
        return rounding.held(name, shape)
    return rounding.held(name, shape[1])


def _parted(
    theirs: Held | None, wrong: Form | None, permuted: bool, left: int, right: int, columns: int
) -> bool:
    """Whether the columns left .. right-1 of `columns` are whole groups, of several in a row: what
    is wrong with them is something else.
    """
    if theirs is None or wrong is not None or permuted or theirs.group >= columns:
        return False
    return _cuts(theirs.group, left, right, columns)


def _group(mine: Held | None, theirs: Held | None) -> int:
    held = mine if theirs is None else theirs
    return 0 if held is None else held.group


def _cuts(group: int, left: int, right: int, columns: int) -> bool:
    """Whether columns left .. right-1 of `columns` are whole groups, and whole pairs."""
    size = 2 if group >= columns else group
    return left % size == 0 and (right == columns or right % size == 0)


def _alike(mine: Held | None, theirs: Held | None, left: int, right: int, columns: int) -> bool:
    """Whether a rank's columns left .. right-1 of `columns` get the scales of the whole matrix,
    which is held as `theirs`.
    """
    if mine is None or theirs is None or right - left == columns:
        return mine == theirs
    row = theirs.group >= columns
    if theirs.outliers or (row and theirs.scale_bytes is None):
        return False  # what is rounded here has the largest of its own columns
    same = replace(mine, group=theirs.group) == theirs
    if row:
        return same and mine.group == right - left
    # a scale that is dealt out to parts of its group is the same scale
    return same and theirs.group % mine.group == 0 and _cuts(theirs.group, left, right, columns)
