"""What is tried on a small random checkpoint of a variant. A probe returns "" where it worked, or
the engine's own sentence; anything else that goes wrong is an error of the engine.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine import LLM, Full, OmniKV
from engine.base.errors import EngineError
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.methods.registry import methods
from engine.model.config.config import ModelConfig
from tools.calibrate import cli as calibrate
from tools.families.models import VOCAB, ids_of
from tools.families.templates import renders_alike

TEXT = 330  # tokens of the text that is read: more than the windows of the variants but one
MORE = 3  # decode steps whose logits are compared
AGREES = 2e-3  # logits in float32, against Full() on the device
EVERYTHING = 512  # a budget that holds the text
# settings under which a method reads everything (or most: see SPARSE); the others take `tokens`
SETTINGS: dict[str, dict[str, object]] = {
    "full": {},
    "fastgen": {"eps": 0.0},
    "brutal_offload": {"layers": 1, "ahead": 1},
    "omnikv_top_p": {"tokens": EVERYTHING, "mass": 1.0},
    "oracle_topp": {"tokens": EVERYTHING, "p": 1.0},
    "infllm": {"local": EVERYTHING},
    "em_llm": {"tokens": EVERYTHING, "local": 64, "most": 32},
    "minference": {},
    "quoka": {"tokens": EVERYTHING, "block": 16},
    "xattention": {"threshold": 1.0},
    "pod_untrained": {},
    "pqcache": {"tokens": EVERYTHING, "train": 64},
    "retroinfer": {"tokens": EVERYTHING, "segment": 64, "per": 8},
    "a2ats": {"tokens": EVERYTHING, "train": 256},
    "infinigen": {"tokens": EVERYTHING, "alpha": float("inf")},
    "magicpig": {"recent": EVERYTHING},
    "h2o_plus": {"tokens": EVERYTHING, "segment": EVERYTHING},
    "snapkv_plus": {"tokens": EVERYTHING, "segment": EVERYTHING},
}
CHOOSING = {"tail": 64, "dense_below": 0}  # of the methods named omnikv...
# what has no setting under which it reads everything: its logits must only be finite
SPARSE = ("omnikv_one",)


@dataclass(frozen=True)
class Attempt:
    """One probe of one variant. why: "" where it worked, else the engine's sentence."""

    name: str
    why: str


def attempts(folder: Path, config: ModelConfig, work: Path) -> list[Attempt]:
    """Try everything on a model folder. work: a folder for files of the calibration."""
    ids = ids_of(TEXT + MORE)
    llm = LLM(folder, device="cpu", method=Full(), chunk=128, max_context=EVERYTHING)
    wanted = _logits(llm, Full(), ids)
    seeing = config.seeing_layers
    first = seeing[0] if seeing else 0
    omni = OmniKV(filter_layers=(first,), tokens=EVERYTHING, tail=64, dense_below=0)
    sparse = OmniKV(filter_layers=(first,), tokens=20, tail=64, dense_below=0)
    prefill = OmniKV(
        filter_layers=(first,),
        tokens=EVERYTHING,
        tail=64,
        dense_below=0,
        prefill_ratio=8,
        prefill_block=64,
    )

    # where every layer slides there is no filter layer, and only full attention
    chosen: Method = omni if seeing else Full()

    def equal(method: Method, offload: str | None = None, chunk: int = 128) -> None:
        made = llm if chunk == 128 else LLM.sharing(llm, chunk=chunk)
        worst = (_logits(made, method, ids, offload) - wanted).abs().max()
        assert worst <= AGREES, f"{method}: logits {float(worst):.4f} apart"

    probes: list[tuple[str, Callable[[], object]]] = [
        ("plan", lambda: _plan(folder, chosen)),
        ("calibrate --by loss", lambda: _calibrate(folder, work, "loss")),
        ("calibrate --by reads", lambda: _calibrate(folder, work, "reads")),
        ("offload", lambda: (equal(Full(), "host"), equal(chosen, "host"))),
        ("exact prefill", lambda: (equal(Full(), chunk=EVERYTHING), equal(Full(), chunk=7))),
        ("OmniKV-prefill", lambda: equal(prefill)),
        ("sessions on disk", lambda: _save(llm, ids, work / "session")),
        ("full", lambda: equal(Full())),
        ("omnikv", lambda: (equal(omni), _logits(llm, sparse, ids))),
        ("exact", lambda: equal(Exact(sparse))),
    ]
    for name, kind in methods().items():
        if name not in ("full", "omnikv"):
            probes.append((name, _method(kind, name, first, equal, llm, ids)))
    return [Attempt(name, _tried(probe)) for name, probe in probes]


def chat(family: str) -> Attempt:
    """Try the family's chat template."""
    return Attempt("chat template", renders_alike(family))


def _method(
    kind: type[Method],
    name: str,
    first: int,
    equal: Callable[[Method], None],
    llm: LLM,
    ids: Sequence[int],
) -> Callable[[], object]:
    settings = dict(SETTINGS.get(name, {"tokens": EVERYTHING}))
    if name == "duo":  # every head sees everything
        config = llm.config
        gates = ((1.0,) * config.num_kv_heads,) * config.num_layers
        settings = {"gates": gates, "share": 1.0}
    if name == "razor":
        scores = ((1.0,) * llm.config.num_kv_heads,) * llm.config.num_layers
        settings = {"heads": (scores, scores), "induction": 1.0}
    if name in ("kascade", "kascade_tiles", "less_is_more", "delta"):
        settings["anchors" if name.startswith("kascade") else "layers"] = (first,)
    if name == "double_sparsity":
        channels = ((tuple(range(llm.config.head_dim)),) * llm.config.num_kv_heads,)
        settings["channels"] = channels * llm.config.num_layers
    if name.startswith("omnikv"):
        settings = {"filter_layers": (first,), **CHOOSING, **settings}
    if name in SPARSE:
        del settings["tokens"]
        return lambda: _logits(llm, kind(**settings), ids)
    return lambda: equal(kind(**settings))


def _tried(probe: Callable[[], object]) -> str:
    try:
        probe()
    except EngineError as error:
        return str(error)
    return ""


def _logits(
    llm: LLM, method: Method, ids: Sequence[int], offload: str | None = None
) -> torch.Tensor:
    """float32 [MORE + 1, vocab]: after the text, and after each of MORE decode steps."""
    with llm.session(method, offload=offload) as session:
        found = [session.prefill(ids[:TEXT])]
        found += [session.decode(token) for token in ids[TEXT:]]
    logits = torch.stack([row for row in found if row is not None])
    assert logits.shape == (MORE + 1, VOCAB) and torch.isfinite(logits).all(), method
    return logits


def _plan(folder: Path, method: Method) -> None:
    """The plan is printed without weights, and its bank is the bytes of a session's."""
    llm = LLM(folder, device="cpu", method=method, max_context=EVERYTHING, load=False)
    assert str(llm.plan())
    items = {name: size for name, size, _ in llm.plan().items}
    with llm.session() as session:
        held = items["context bank"] + items.get("sliding windows", 0)
        held += items.get("recurrent state", 0)
        assert session.bank.nbytes == held, (session.bank.nbytes, held)


def _calibrate(folder: Path, work: Path, by: str) -> None:
    text = work / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in ids_of(1030)), encoding="utf-8")
    flags = ["--model", str(folder), "--device", "cpu", "--by", by, "--text", str(text)]
    flags += ["--length", "512", "--positions", "4", "--dry-run", "--out", str(work / "x.json")]
    flags += ["--fresh"] if by == "loss" else []
    with _silent():
        calibrate.run(calibrate.parser().parse_args(flags))


def _save(llm: LLM, ids: Sequence[int], path: Path) -> None:
    with llm.session() as session:
        session.prefill(ids[:TEXT])
        session.save(path)
        wanted = session.decode(ids[TEXT])
    again, _ = llm.restore(path)
    with again:
        assert torch.equal(again.decode(ids[TEXT]), wanted)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        with contextlib.redirect_stdout(io.StringIO()):
            yield
