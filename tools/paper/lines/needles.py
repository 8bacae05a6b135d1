"""Figure 7 of the OmniKV paper: needles by depth and length under OmniKV whose bank is in host
memory, also where full attention on the device does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine import LLM, Full, OmniKV
from engine.base.errors import EngineError
from engine.methods.base import Method
from engine.methods.controls.controls import OmniKVRandom
from tools.common.page import pyplot
from tools.common.records import Record
from tools.compare.plots import depth_maps
from tools.compare.run import speak
from tools.paper.meters.answers import asked
from tools.tasks.prompts import answer_text

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS = 1024  # the paper's budget; a shorter prompt's is a fifteenth of it
ROOM = 48  # tokens of an answer, at most


def planned(filters: Sequence[int] | None) -> OmniKV:
    """The method that the model is loaded for."""
    return OmniKV(filter_layers=tuple(filters) if filters else None, tokens=TOKENS, dense_below=0)


def measure(llm: LLM, number: int, length: int) -> list[Record]:
    """Records of one needle: 100 or 0 for full attention on the device where it fits, OmniKV over
    the host and tokens by chance over the host.
    """
    depth = DEPTHS[number % len(DEPTHS)]
    prompt = asked(llm, "needle", length, number, depth)
    method = llm.planner.options.method
    assert isinstance(method, OmniKV)
    own = dict(filter_layers=method.filter_layers, tokens=max(1, min(TOKENS, length // 15)))
    columns: dict[str, tuple[Method, str]] = {
        "full on the device": (Full(), "device"),
        "omnikv on the host": (OmniKV(dense_below=0, **own), "host"),
        "omnikv_random on the host": (OmniKVRandom(dense_below=0, **own), "host"),
    }
    out: list[Record] = []
    for name, (chosen, place) in columns.items():
        try:
            session = llm.session(chosen, max_context=len(prompt.ids) + ROOM, offload=place)
        except EngineError:
            if place == "host":
                raise
            continue  # what does not fit on the device has no row
        with session:
            tokens = speak(session, prompt.ids, ROOM, place == "host").tokens
        right = 100.0 * (prompt.exact in answer_text(llm.tokenizer, tokens))
        for column in (f"depth {100 * depth:.0f}%", "all"):
            out.append({"method": name, "column": column, "value": right, "depth": depth})
    return out


def picture(records: Sequence[Record], path: Path) -> Path | None:
    """The heat map of each method, by depth and length; None without matplotlib."""
    if pyplot() is None:
        return None
    rows: dict[tuple[str, int], Record] = {}
    for record in records:
        if record["column"] == "all":
            name, length = record["method"], record["length"]
            empty = {"variant": name, "name": name, "kind": "none", "budget": 100.0, "kept": []}
            empty |= {"length": length, "depths": [[0, 0] for _ in DEPTHS]}
            bin_ = rows.setdefault((name, length), empty)["depths"][DEPTHS.index(record["depth"])]
            bin_[0] += record["value"] == 100.0
            bin_[1] += 1
    return depth_maps(list(rows.values()), path, "needle") if rows else None
