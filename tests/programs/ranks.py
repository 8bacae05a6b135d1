"""Every method, every family and every quantised format over ranks beside one process:
`python -m tests.programs.ranks [--ranks N] [--split-by context] [--only NAME ...]`.

Ranks are threads of one process, each with its own share of the model (tests/engine/ranks). A line
for each method, each family, each format of quantised checkpoints and each type of GGUF files: the
greatest difference of a logit (float32; a prompt of 300 tokens and 12 steps, 150 and 6 for all but
methods), whether the selections are one process's, or why it is refused. Exit code 1 where one that
runs differs by more than LIMIT; one process's own rounding stands beside it then. Products of few
bits round what they multiply where there are no C++ kernels: there a stored model's ranks may be
twice as far from its floats as one process is.

--model FOLDER: real processes hold this model instead, and write as many greedy tokens as one
process does (--prompt, --steps), under each of a few methods and in both tiers. With
OMNIKV_NATIVE=0 their sums go through Gloo. --split-by context: each rank has its own tokens' rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from engine import LLM, Exact, Full, OmniKV, RankedLLM, SamplingParams, SnapKV, StreamingLLM
from engine.base.errors import EngineError
from kernels.quant.native import usable
from tests.builders import tiny_weights
from tests.engine.methods.method_table import ROWS
from tests.engine.model.test_gpt_oss import packed
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tests.engine.ranks.threads import Together
from tests.tools.gguf_files import llama_config, write_llama
from tests.weights.quantised_files import FORMATS, write
from tools.families.models import VARIANTS, make
from weights.gguf.header import KINDS

LIMIT = 1e-4  # the bound of a float32 logit
MXFP4 = "gpt-oss-mxfp4"  # beside the families' variants
GGUF = "GGUF "  # before a file's type


def answer(llm, method, ids, steps):
    """Logits of a prompt and of steps, the selections, and how many steps were sparse."""
    with llm.session(method=method) as session:
        logits, chosen = [session.prefill(ids)], []
        for token in steps:
            logits.append(session.decode(token))
            chosen.append({layer: rows.clone() for layer, rows in session.selections.items()})
        return torch.stack(logits), chosen, session.stats.sparse_steps


def compared(one, many, method, prompt, steps) -> str:
    """A line about one request: what differs, or why it is refused."""
    ids, more = ids_of(prompt), ids_of(steps, seed=6)
    want, chosen, sparse = answer(one, method, ids, more)
    try:
        found = many.each(answer, method, ids, more)
    except EngineError as error:
        return f"refused: {error}"
    worst = max(float((logits - want).abs().max()) for logits, _, _ in found)
    same = all(
        x.keys() == y.keys() and all(torch.equal(x[layer], y[layer]) for layer in x)
        for x, y in zip(chosen, found[0][1])
    )
    whose = "equal" if same else "of own heads"
    if worst <= LIMIT:
        return f"{worst:.1e}, {sparse} sparse steps, selections {whose}"
    own = rounding(one, method, ids, more, want)
    beside = f" (one process from its own reference launchers: {own:.1e})"
    return f"{worst:.1e}{beside}, {sparse} sparse steps, selections {whose} DIFFERS"


def rounding(one, method, ids, steps, want) -> float:
    """How far one process's own logits are from `want` with sums in another order: under reference
    launchers.
    """
    with one.session(method=method) as session:
        session.set_backend("reference")
        logits = [session.prefill(ids), *(session.decode(token) for token in steps)]
    return float((torch.stack(logits) - want).abs().max())


def methods(folder: Path, ranks: int, only: list[str], split_by: str) -> Iterator[tuple[str, str]]:
    """(name, line) of every method of the table."""
    place = model_folder(folder / "methods")
    one, many = (
        LLM(place, method=Full(), **SETTINGS),
        Together(place, ranks, split_by=split_by, method=Full(), **SETTINGS),
    )
    for row in ROWS:
        if not only or row.name in only:
            for method in row.sparse or (row.neutral,):
                yield row.name, compared(one, many, method, 300, 12)


def families(folder: Path, ranks: int, only: list[str], split_by: str) -> Iterator[tuple[str, str]]:
    """(name, line) of every variant of every family."""
    for name in (*VARIANTS, MXFP4):
        if only and name not in only:
            continue
        place = folder / name
        if name == MXFP4:
            packed(place, make(place, "gpt-oss", hidden_size=64, intermediate_size=160))
        else:
            make(place, name)
        settings = SETTINGS | dict(method=Full())
        if name == MXFP4 and not usable():  # torch's products of int8 in groups round their inputs
            settings["weights"] = "float"
        try:
            many = Together(place, ranks, split_by=split_by, **settings)
        except EngineError as error:
            yield name, f"refused: {error}"
            continue
        yield name, compared(LLM(place, **settings), many, Full(), 150, 6)


def stored(folder: Path, ranks: int, only: list[str], split_by: str) -> Iterator[tuple[str, str]]:
    """(name, line) of every quantised format and of every type of GGUF files."""
    sizes = dict(layers=2, heads=8, kv_heads=2, intermediate_size=512)
    config = llama_config(**sizes, head_dim=32)
    for name in (*FORMATS, *(GGUF + kind for kind in KINDS)):
        if only and name not in only:
            continue
        place = folder / f"{name.replace(' ', '-').replace(',', '')}.gguf"
        if name.startswith(GGUF):
            write_llama(place, config, tiny_weights(config), name.removeprefix(GGUF))
        else:
            write(place, name, **sizes, vocab_size=100)
        settings = SETTINGS | dict(method=Full())
        try:
            many = Together(place, ranks, split_by=split_by, **settings)
        except EngineError as error:
            yield name, f"refused: {error}"
            continue
        one = LLM(place, **settings)
        line = compared(one, many, Full(), 150, 6)
        if line.endswith("DIFFERS") and not usable():
            line = beside_floats(one, LLM(place, **settings, weights="float"), many)
        yield name, line


def beside_floats(one, floats, many) -> str:
    """A line about how far ranks are from a model's floats, and one process is."""
    ids, more = ids_of(150), ids_of(6, seed=6)
    exact, own = (answer(llm, Full(), ids, more)[0] for llm in (floats, one))
    off = float((own - exact).abs().max())
    worst = max(float((x - exact).abs().max()) for x, *_ in many.each(answer, Full(), ids, more))
    wrong = "" if worst <= 2 * off + LIMIT else " DIFFERS"
    return f"{worst:.1e} from its floats, one process {off:.1e}{wrong}"


def written(llm, method, offload, ids, steps):
    """Greedy tokens behind a prompt, the logits behind it and behind each, and the selections."""
    with llm.session(method=method, offload=offload) as session:
        logits, chosen, tokens = [session.prefill(ids)], [], []
        for _ in range(steps):
            tokens.append(int(logits[-1].argmax()))
            logits.append(session.decode(tokens[-1]))
            chosen.append({layer: rows.clone() for layer, rows in session.selections.items()})
        return torch.stack(logits), chosen, tokens


def processes(
    model: str, ranks: int, prompt: int, steps: int, split_by: str
) -> Iterator[tuple[str, str]]:
    """(name, line) of methods over real processes; the last line is of exact mode."""
    sparse = OmniKV(tokens=64, dense_below=0)
    settings = dict(max_context=prompt + 2 * steps, dtype="float32", device="cpu", method=sparse)
    one = LLM(model, **settings, threads=1)
    many = RankedLLM(model, ranks, split_by=split_by, timeout=600, **settings)
    ids = torch.randint(5, 5000, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    methods = (Full(), sparse, StreamingLLM(tokens=64), SnapKV(tokens=64))
    for method in methods:
        for offload in ("device", "host"):
            name = f"{method.name}, {offload}"
            try:
                want, own, tokens = written(one, method, offload, ids, steps)
                found, theirs, others = written(many, method, offload, ids, steps)
            except EngineError as error:
                yield name, f"refused: {error}"
                continue
            worst = float((found - want).abs().max())
            same = all(x.keys() == y.keys() for x, y in zip(own, theirs)) and all(
                torch.equal(x[layer], y[layer]) for x, y in zip(own, theirs) for layer in x
            )
            wrong = "" if worst <= LIMIT and tokens == others else " DIFFERS"
            equal = sum(a == b for a, b in zip(tokens, others))
            yield name, f"{worst:.1e}, {equal} of {steps} tokens, selections equal: {same}{wrong}"
    yield "exact", exactly(one, many, sparse, ids, steps)
    many.close()


def exactly(one, many, sparse, ids, steps) -> str:
    """A line about exact mode's text beside full attention's."""
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    texts = []
    for llm, method in ((one, Full()), (many, Exact(sparse, draft=4))):
        with llm.session(method=method) as session:
            texts.append([piece.token_id for piece in session.generate(ids, params)])
            stats = session.stats
    wrong = "" if texts[0] == texts[1] else " DIFFERS"
    return f"{stats.accepted} of {stats.drafted} drafts taken, full attention's text{wrong}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--split-by", default="heads", choices=("heads", "context"))
    parser.add_argument("--only", nargs="+", default=[], help="these methods, variants and formats")
    parser.add_argument("--model", help="a model that real processes hold")
    parser.add_argument("--prompt", type=int, default=300, help="tokens read (with --model)")
    parser.add_argument("--steps", type=int, default=24, help="tokens written (with --model)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = {"equal": 0, "refused": 0, "DIFFERS": 0}
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            part(Path(folder), args.ranks, args.only, args.split_by)
            for part in (methods, families, stored)
        ]
        if args.model:
            parts = [processes(args.model, args.ranks, args.prompt, args.steps, args.split_by)]
        for part in parts:
            for name, line in part:
                kind = "refused" if line.startswith("refused") else "equal"
                kind = "DIFFERS" if line.endswith("DIFFERS") else kind
                counts[kind] += 1
                print(f"{name:24} {line[:150]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["DIFFERS"] > 0)


if __name__ == "__main__":
    sys.exit(main())
