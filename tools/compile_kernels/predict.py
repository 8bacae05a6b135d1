"""Predict what a GPU needs from compiled kernels, without one: counted instructions and bytes.

    python -m tools.compile_kernels.predict [--table FILE]

Llama-3-8B on an H200: every matrix of a step in bfloat16, int8 and int4 for 1, 4 and 8 rows, then
steps by context and a prompt, beside the goals. A product takes the longest of three times: its
bytes from memory, its bytes from L2 (the weights, and x again for every program), and the
instructions of its loop, as compiled for sm_90. Constants are a desk check's; nothing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.launch.triton import HAVE_TRITON, triton
from kernels.rows.forms import DTYPES, row_widths
from tools.common.arguments import command
from tools.common.program import replace_text
from tools.compile_kernels.cases import Case
from tools.compile_kernels.compiler import Report, compile_for, describe, measure
from tools.compile_kernels.variants import Launch, variants

TARGET = "sm_90"
READ, L2 = 4.3e12, 5.5e12  # bytes a second: a copy on an H200; what others measured of an H100's L2
# operations a second: 132 SMs of 128 lanes at 1.755 GHz, 75% of them issued
ISSUE = 132 * 128 * 1.755e9 * 0.75
LAUNCH = 2.0e-6  # seconds of a product beside those
DENSE_SHARE, DENSE_LAUNCH, SPARSE = 0.93, 6e-6, 6.5e-6  # attention of a layer
SMALL = 0.25e-3  # all small kernels of a step
CHOICE, CHOICE_TOKEN = 0.035e-3, 3.45e-10  # three selections, and what each token adds
PRODUCT_FLOPS, ATTENTION_FLOPS, PROMPT_REST = 523e12, 595e12, 0.5  # of a prompt

LAYERS, HIDDEN, INNER, VOCABULARY, KV_HEADS, HEAD_DIM = 32, 4096, 14336, 128256, 8, 128
DENSE_LAYERS = 8  # of OmniKV with filters 2, 8, 18 and one wait layer
# matrix, outputs as stored, inputs, how often in a step
MATRICES = (
    ("q/k/v", 6144, HIDDEN, LAYERS),
    ("output", HIDDEN, HIDDEN, LAYERS),
    ("gate and up", 2 * INNER, HIDDEN, LAYERS),
    ("down", HIDDEN, INNER, LAYERS),
    ("lm_head", VOCABULARY, HIDDEN, 1),
)
BITS = {"W16": 16.0, "W8": 8 + 16 / 64, "W4": 4 + 32 / 32}  # a weight's, with scales and offsets
ROWS = (1, 4, 8)


@dataclass(frozen=True)
class Loop:
    """A compiled kernel's longest loop: operations a lane executes for each element that it reads,
    and outputs of a program.
    """

    operations: float
    held: int


def counted(launch: Launch) -> Report:
    """Compile a launch and count."""
    report = Report(launch.function.__name__, describe(launch), TARGET, True)
    measure(compile_for(launch, TARGET), report)
    return report


def product_loops(kind: str) -> dict[str, Loop]:
    """The loops of a kind's products by matrix."""
    case = {"W16": Case("product"), "W8": Case("few_bits", packed="int8")}
    found: dict[str, Loop] = {}
    for launch in variants([case.get(kind, Case("few_bits"))], (9, 0)):
        of = launch.constants
        rows = of["HELD"] * (2 if of["GATED"] else 1)
        columns = of["STEP"] if "STEP" in of else of["ALONG"] * of["SETS"] * 16 * of["PARTS"]
        lanes = 32 * launch.options["num_warps"]
        loop = counted(launch).instructions["loop"]
        form = "gated" if of["GATED"] else "residual" if of["RESIDUAL"] else "plain"
        found.setdefault(form, Loop(loop * lanes / (rows * columns), rows))
    names = {"gate and up": "gated", "output": "residual", "down": "residual"}
    return {name: found[names.get(name, "plain")] for name, *_ in MATRICES}


def product_seconds(kind: str, loop: Loop, outputs: int, inputs: int, rows: int) -> float:
    """Seconds of one product, the longest of memory, L2 and issue, and its launch."""
    weights = outputs * inputs
    size = weights * BITS[kind] / 8
    again = -(-outputs // loop.held) * rows * inputs * 2
    return max(size / READ, (size + again) / L2, weights * loop.operations / ISSUE) + LAUNCH


def kind_of(kind: str, matrix: str) -> str:
    """How a matrix is held: lm_head in int8 where the others are int4."""
    return "W8" if (kind, matrix) == ("W4", "lm_head") else kind


def weights_seconds(kind: str, loops: dict[str, dict[str, Loop]], rows: int) -> float:
    """Seconds of all products of a step."""
    return sum(
        count * product_seconds(held, loops[held][name], outputs, inputs, rows)
        for name, outputs, inputs, count in MATRICES
        for held in (kind_of(kind, name),)
    )


def weights_bytes(kind: str) -> float:
    """Bytes of all matrices of a step."""
    return sum(
        count * outputs * inputs * BITS[kind_of(kind, name)] / 8
        for name, outputs, inputs, count in MATRICES
    )


def bank_bytes(packed: str) -> int:
    """Bytes of a token in one layer."""
    if not packed:
        return 2 * KV_HEADS * HEAD_DIM * 2
    kind = DTYPES[packed]
    return KV_HEADS * sum(row_widths(HEAD_DIM, kind)) * kind.itemsize


def dense_operations(packed: str) -> float:
    """Operations of a lane for each token of a layer, in the loop of dense attention."""
    launch = next(
        found
        for found in variants([Case("dense", packed=packed)], (9, 0))
        if found.function.__name__ == "dense_kernel"
    )
    loop = counted(launch).instructions["loop"]
    return KV_HEADS * 32 * launch.options["num_warps"] * loop / launch.constants["BLOCK"]


def attention_seconds(context: int, sparse: bool, packed: str, operations: float) -> float:
    """Seconds of a step's attention, and of choosing where layers are sparse."""
    read = context * bank_bytes(packed) / (DENSE_SHARE * READ)
    dense = max(read, context * operations / ISSUE) + DENSE_LAUNCH
    if not sparse:
        return LAYERS * dense
    chosen = CHOICE + context * CHOICE_TOKEN
    return DENSE_LAYERS * dense + (LAYERS - DENSE_LAYERS) * SPARSE + chosen


def floor_seconds(kind: str, context: int, sparse: bool, packed: str = "") -> float:
    """Seconds of a step's bytes: 2,048 tokens and a tail of 384 in a sparse layer."""
    rows = context * LAYERS
    if sparse:
        rows = context * DENSE_LAYERS + 2432 * (LAYERS - DENSE_LAYERS)
    return (weights_bytes(kind) + rows * bank_bytes(packed)) / READ


def product_lines(loops: dict[str, dict[str, Loop]]) -> Iterator[str]:
    """A table of products: a row per kind and matrix, then all of a step."""
    yield "| weights | matrix | operations a weight | us at 1 row | 4 | 8 | 8 rows / 1 row |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for kind in BITS:
        for name, outputs, inputs, _ in MATRICES:
            held = kind_of(kind, name)
            loop = loops[held][name]
            times = [1e6 * product_seconds(held, loop, outputs, inputs, r) for r in ROWS]
            cells = " | ".join(f"{t:.1f}" for t in times)
            ratio = times[-1] / times[0]
            yield f"| {kind} | {name} | {loop.operations:.2f} | {cells} | {ratio:.2f} |"
        times = [1e6 * weights_seconds(kind, loops, rows) for rows in ROWS]
        cells = " | ".join(f"{t:.0f}" for t in times)
        yield f"| {kind} | **a step** | | {cells} | {times[-1] / times[0]:.2f}, goal 1.25 |"


def step_lines(loops: dict[str, dict[str, Loop]], dense: dict[str, float]) -> Iterator[str]:
    """A table of steps: kind, method, bank and context."""
    yield "| step of one row | context | ms | floor | share | goal |"
    yield "|---|---:|---:|---:|---:|---|"
    goals = {
        ("W16", False, "", 131072): "<= 8.8",
        ("W16", False, "", 450000): "85%",
        ("W16", True, "", 131072): "<= 5.7",
        ("W16", True, "", 450000): "<= 8.2",
        ("W8", False, "", 8192): "75%",
        ("W4", False, "", 8192): "75%",
    }
    cells = [("W16", sparse, "", n) for sparse in (False, True) for n in (8192, 131072, 450000)]
    cells += [(kind, False, "", 8192) for kind in ("W8", "W4")]
    cells += [
        ("W16", sparse, bank, 131072) for bank in ("int8", "int4") for sparse in (False, True)
    ]
    for kind, sparse, bank, n in cells:
        ms = 1e3 * (
            weights_seconds(kind, loops, 1)
            + attention_seconds(n, sparse, bank, dense[bank])
            + SMALL
        )
        floor = 1e3 * floor_seconds(kind, n, sparse, bank)
        name = f"{'omnikv w1' if sparse else 'full'}, {kind}" + (f", {bank} bank" if bank else "")
        goal = goals.get((kind, sparse, bank, n), "")
        yield f"| {name} | {n} | {ms:.2f} | {floor:.2f} | {floor / ms:.0%} | {goal} |"


def prompt_seconds(tokens: int) -> float:
    """Seconds of a prompt under full attention."""
    layers = weights_bytes("W16") / 2 - VOCABULARY * HIDDEN
    attention = LAYERS * 2 * tokens**2 * HIDDEN
    return 2 * layers * tokens / PRODUCT_FLOPS + attention / ATTENTION_FLOPS + PROMPT_REST


def report() -> str:
    """The page."""
    loops = {kind: product_loops(kind) for kind in BITS}
    dense = {packed: dense_operations(packed) for packed in ("", "int8", "int4")}
    return "\n".join(
        [
            "# Predicted: Llama-3-8B on an H200",
            "",
            f"Written by `python -m tools.compile_kernels.predict --table FILE` with triton "
            f"{triton.__version__}, no GPU. Every figure is predicted, none is measured.",
            "",
            f"Constants: memory {READ / 1e12} TB/s, L2 {L2 / 1e12} TB/s, issue at 75% of 132 SMs "
            f"at 1.755 GHz, {1e6 * LAUNCH:.1f} us a product, dense attention at {DENSE_SHARE:.0%} "
            f"of memory's rate and {1e6 * DENSE_LAUNCH:.0f} us, a sparse layer "
            f"{1e6 * SPARSE:.1f} us, "
            f"{1e3 * SMALL:.2f} ms of small kernels. L2 hands out the weights once and x once for "
            "every program; what programs of an SM share in L1 is left out.",
            "",
            *product_lines(loops),
            "",
            *step_lines(loops, dense),
            "",
            f"A prompt of 131,072 tokens under full attention: {prompt_seconds(131072):.1f} s "
            "(predicted; goal <= 12).",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page. Exit code 0, or 2 without triton."""
    p = command("python -m tools.compile_kernels.predict", "Predict times from compiled kernels.")
    p.add_argument("--table", metavar="FILE", type=Path, help="write the page there too")
    options = p.parse_args(argv)
    if not HAVE_TRITON:
        print("predict: triton is not installed here, nothing to count", file=sys.stderr)
        return 2
    page = report()
    print(page)
    if options.table:
        replace_text(options.table, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
