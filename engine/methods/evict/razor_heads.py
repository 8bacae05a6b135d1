"""Files of RazorAttention's head scores: the JSON of tools/studies/razor_heads.py, which names the
model that it was made for. A K/V head's score is the largest of its query heads'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.checks import found
from engine.base.errors import SettingError
from engine.methods.evict.duo_gates import Gates, checked_gates
from engine.methods.tables.head_table import FORMAT, Facts, Table, facts_of, table_data, table_text
from engine.model.config.config import ModelConfig

Heads = tuple[Gates, Gates]  # echo and induction scores, each [layer][K/V head], in [0, 1]

HOW = "make them in a clone: python -m tools.studies.razor_heads --model FOLDER"
SCORES = Table("heads", HOW)


def read_heads(path: Path) -> tuple[Heads, Facts]:
    """The scores of a file, and the numbers of the model that it names. Raises SettingError where
    it is no such file.
    """
    data, facts = table_data(path, table_text(path, SCORES), SCORES)
    return checked_heads([data.get("echo"), data.get("induction")]), facts


def heads_text(heads: Heads, config: ModelConfig, more: dict[str, Any]) -> str:
    """A JSON text of scores that were found for a model, beside what else is to be known."""
    data = {"format": FORMAT, "model": dict(facts_of(config)), **more}
    data |= {"echo": heads[0], "induction": heads[1]}
    return json.dumps(data, indent=1) + "\n"


def checked_heads(heads: Any) -> Heads:
    """Echo and induction scores as tuples. Raises SettingError where they are no two tables of one
    shape of numbers from 0 to 1.
    """
    if not isinstance(heads, (list, tuple)) or len(heads) != 2:
        raise SettingError(
            f"heads: found {found(heads)}, expected two tables [layer][K/V head], of echo and of "
            "induction scores, or a file that holds them"
        )
    echo, induction = (checked_gates(table, SCORES) for table in heads)
    shapes = [(len(table), len(table[0])) for table in (echo, induction)]
    if shapes[0] != shapes[1]:
        raise SettingError(
            f"heads: found echo scores of {shapes[0][0]} layers of {shapes[0][1]} K/V heads and "
            f"induction scores of {shapes[1][0]} of {shapes[1][1]}, expected equally many"
        )
    return echo, induction
