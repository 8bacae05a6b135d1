"""Remove from a cache what it holds of a text: its blocks, and all that go on from it.

A block's name follows from its parent's and its own tokens, so whoever has the text finds them; a
folder tells nobody else what was read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import SavedFileError
from engine.saved.cache import SUFFIX, BlockCache, names_of, root_of
from engine.saved.container import Reader
from engine.saved.rows import PIECE

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.methods.base import Method


def forget_text(cache: BlockCache, llm: LLM, methods: Iterable[Method], ids: Sequence[int]) -> int:
    """Remove the blocks of a text whose tokens are `ids`, read under one of `methods`, and those of
    whatever begins with it; how many there were. Blocks that another text shares with its beginning
    go too: that text is read again.
    """
    held = _tokens(cache)
    doomed: set[str] = set()
    rest = array("q", ids[len(ids) // PIECE * PIECE :]).tobytes()
    for method in methods:
        names = names_of(llm, method, ids)
        doomed |= held.keys() & set(names)
        begun = names[-1] if names else root_of(llm, method)
        after = {name for name in _children(begun, held) if held[name].startswith(rest)}
        while after:
            doomed |= after
            after = {child for name in after for child in _children(name, held)}
    for name in doomed:
        cache.path(name).unlink(missing_ok=True)
    return len(doomed)


def _children(parent: str, held: dict[str, bytes]) -> set[str]:
    begun = hashlib.sha256(parent.encode())
    found = set()
    for name, tokens in held.items():
        digest = begun.copy()
        digest.update(tokens)
        if digest.hexdigest() == name:
            found.add(name)
    return found


def _tokens(cache: BlockCache) -> dict[str, bytes]:
    """Token ids of every block that can be read, by its name."""
    found, stored = {}, torch.empty(PIECE, dtype=torch.int64)
    for path in Path(cache.folder).glob(f"*/*{SUFFIX}"):
        try:
            with Reader(path) as reader:
                reader.read("ids", stored)
        except SavedFileError:
            continue  # damaged, or another process removed it
        found[path.name.removesuffix(SUFFIX)] = array("q", stored.tolist()).tobytes()
    return found
