"""Removal of a text from a cache: its blocks, and all blocks that continue it.

A block's name is computed from its parent's name, its own tokens and the origins of its rows. The
text is needed to find them; the folder alone does not reveal it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from engine.bank.row_origins import FULL
from engine.base.errors import SavedFileError
from engine.load.loaded import Loaded
from engine.saved.cache import SUFFIX, BlockCache, name_of, root_of
from engine.saved.container import Reader
from engine.saved.rows import PIECE


class _Held(NamedTuple):
    parent: str
    tokens: bytes
    origin: str


def forget_text(cache: BlockCache, loaded: Loaded, ids: Sequence[int]) -> int:
    """Remove the blocks of a text whose tokens are `ids`, however they were read, and those of
    whatever begins with it; how many there were. Blocks that another text shares with its beginning
    go too: that text is read again.
    """
    held = _held(cache)
    children: dict[str, list[str]] = {}
    for name, block in held.items():
        children.setdefault(block.parent, []).append(name)
    begun, doomed = {root_of(loaded)}, set[str]()
    origins = {FULL} | {block.origin for block in held.values()}
    for first in range(0, len(ids) - PIECE + 1, PIECE):
        tokens = array("q", ids[first : first + PIECE]).tobytes()
        names = {(origin, name_of(p, tokens, origin)) for p in begun for origin in origins}
        # a block that is gone may have left others behind
        begun = {n for o, n in names if o == FULL or n in held or n in children}
        doomed |= begun & held.keys()
    rest = array("q", ids[len(ids) // PIECE * PIECE :]).tobytes()
    after = [n for p in begun for n in children.get(p, ()) if held[n].tokens.startswith(rest)]
    while after:
        doomed.update(after)
        after = [child for name in after for child in children.get(name, ())]
    for name in doomed:
        cache.path(name).unlink(missing_ok=True)
    return len(doomed)


def _held(cache: BlockCache) -> dict[str, _Held]:
    """Return the readable blocks by name. Blocks of another format, which are never found again,
    are removed.
    """
    found, stored = {}, torch.empty(PIECE, dtype=torch.int64)
    for path in Path(cache.folder).glob(f"*/*{SUFFIX}"):
        try:
            with Reader(path) as reader:
                reader.read("ids", stored)
                facts = reader.facts
        except SavedFileError:
            continue  # damaged, or another process removed it
        name, tokens = path.name.removesuffix(SUFFIX), array("q", stored.tolist()).tobytes()
        try:
            block = _Held(str(facts["parent"]), tokens, str(facts["origin"]))
        except (KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if name_of(*block) == name:
            found[name] = block
    return found
