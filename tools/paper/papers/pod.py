"""PoD: "Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity":
the keys of distant tokens once for a block of layers. The paper trains its models for it; here it
runs without that (pod_untrained), so it is a lower bound.
"""

from __future__ import annotations

from tools.paper.table import Command, Table

PAPER = "PoD"
MODEL = "LLaMA3-8B trained to 32K on 5 billion tokens of Dolma; window 4K, 16 sinks, delta 0.5"
TRAINED = "the paper trains PoD, WA+CPT and CLA on 5 billion tokens; pod_untrained is not trained"
AVERAGES = {
    "full": (45.28, 27.45),
    "snapkv 12.5%": (44.17, 25.76),
    "pyramidkv 12.5%": (44.78, 25.90),
    "quest 12.5%": (44.82, 26.94),
    "lm_infinite 12.5%": (42.84, 24.68),
    "streaming_llm 12.5%": (42.80, 24.57),
    "h2o 12.5%": (43.24, 24.60),
    "pod_untrained 12.5%": (44.75, 27.18),
    "pod_snapkv 12.5%": (44.25, 26.50),
}
INFINITE = {
    "full": 40.11,
    "snapkv 12.5%": 38.71,
    "quest 12.5%": 38.33,
    "lm_infinite 12.5%": 14.51,
    "streaming_llm 12.5%": 14.37,
    "pod_untrained 12.5%": 40.56,
    "pod_snapkv 12.5%": 38.39,
}
WORDS = " ".join(f"{name.split()[0]}@12.5" for name in AVERAGES if name != "full")

TABLES = (
    *(
        Table(
            f"pod-{suite}",
            PAPER,
            "main table",
            f"{name}'s average at a window of 4K of 32K tokens",
            MODEL,
            {"llama-3-8b": {row: {"average": v[column]} for row, v in AVERAGES.items()}},
            f"PoD, its table of LongBench and LEval, column {name}",
            lengths=(32768,),
            commands=(Command("suites", f"--methods {WORDS}"),),
            suite=suite,
            differs=TRAINED,
        )
        for column, (suite, name) in enumerate((("longbench", "LongBench"), ("leval", "L-Eval")))
    ),
    Table(
        "pod-infinitebench",
        PAPER,
        "InfiniteBench subset",
        "InfiniteBench's average over 32K, 64K and 128K",
        "LLaMA3.1-8B trained on 5 billion tokens of ProLong; window 4K",
        {"llama-3.1-8b": {row: {"average": value} for row, value in INFINITE.items()}},
        "PoD, its table of InfiniteBench",
        commands=(Command("suites", f"--methods {WORDS}"),),
        suite="infinitebench",
        differs=f"{TRAINED}; which tasks its subset has is not at hand: the average here is of the "
        "OmniKV paper's ten",
    ),
    Table(
        "pod-needle",
        PAPER,
        "Needle in a haystack",
        "needles found at a window of an eighth of the prompt",
        MODEL,
        source="PoD, its needle figures: pictures without numbers (PoD as dense; StreamingLLM and "
        "H2O fail outside their windows)",
        lengths=(32768,),
        commands=(
            Command("compare", f"--methods {WORDS} --tasks needle --turns 1 --judge contains"),
        ),
        differs=TRAINED,
    ),
)
