"""Ada-KV: Feng et al. (2024): eviction whose heads have budgets of their own."""

from __future__ import annotations

from tools.paper.table import Command, Rows, Table

PAPER = "Ada-KV (2024)"
BUDGETS = (128, 256, 512, 1024)
METHODS = ("h2o", "streaming_llm", "snapkv", "pyramidkv", "ada_snapkv", "ada_pyramid")
WORDS = " ".join(f"{name}@t128,t256,t512,t1024" for name in METHODS)


def averages(full: float, *lines: tuple[float, ...]) -> Rows:
    """LongBench's averages: full attention's, and of METHODS at BUDGETS."""
    found = {"full": {"average": full}}
    for name, line in zip(METHODS, lines, strict=True):
        for budget, value in zip(BUDGETS, line, strict=True):
            found[f"{name} {budget:,} tokens"] = {"average": value}
    return found


MISTRAL = averages(
    42.51,
    (34.40, 36.03, 37.22, 38.70),
    (27.63, 28.85, 29.60, 31.02),
    (35.09, 38.66, 40.26, 41.44),
    (35.58, 38.22, 40.01, 41.07),
    (36.71, 39.72, 40.57, 41.54),
    (36.81, 39.28, 40.45, 41.23),
)
LWM = averages(
    29.91,
    (24.97, 26.00, 27.09, 28.00),
    (20.46, 21.96, 23.44, 24.71),
    (24.95, 26.63, 28.17, 29.10),
    (25.06, 26.81, 28.51, 28.91),
    (25.82, 27.66, 28.51, 29.10),
    (26.00, 27.70, 28.41, 28.98),
)
NEEDLES = {"snapkv": 94.84, "ada_snapkv": 95.99, "pyramidkv": 96.02, "ada_pyramid": 96.69}

TABLES = (
    Table(
        "adakv-longbench",
        PAPER,
        "LongBench, 16 sets",
        "LongBench's average by tokens kept for each head",
        "Mistral-7B-Instruct-v0.2 (32K) and LWM-Text-Chat-1M; 128, 256, 512 and 1,024 tokens a "
        "head, window 32, pooling 7; A100-80G",
        {"mistralai/Mistral-7B-Instruct-v0.2": MISTRAL, "LargeWorldModel/LWM-Text-Chat-1M": LWM},
        "Ada-KV, its tables of LongBench's averages",
        lengths=(32768,),
        commands=(Command("suites", f"--methods {WORDS}"),),
        suite="longbench",
    ),
    Table(
        "adakv-needle",
        PAPER,
        "Needle in a haystack",
        "needles found, with budgets by head and without",
        "Mistral-7B-Instruct-v0.2, one A100-80G; up to 429K (SnapKV) and 365K (Pyramid)",
        {
            "mistralai/Mistral-7B-Instruct-v0.2": {
                f"{name} 128 tokens": {"needle": value} for name, value in NEEDLES.items()
            }
        },
        "Ada-KV, the means of its needle figures; their budget is not at hand, 128 is ours",
        lengths=(32768,),
        commands=(
            Command(
                "compare",
                f"--methods {' '.join(f'{name}@t128' for name in NEEDLES)} --tasks needle "
                "--turns 1 --judge contains",
            ),
        ),
    ),
)
