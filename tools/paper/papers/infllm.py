"""InfLLM: Xiao et al., NeurIPS 2024: blocks of the past by representative keys. The figures of its
own tables are not at hand.
"""

from __future__ import annotations

from tools.paper.table import Command, Table

PAPER = "InfLLM (NeurIPS 2024)"
SETTINGS = "not at hand; the published files: blocks of 128, a window of 4,096, 128 initial tokens"

TABLES = (
    Table(
        "infllm-infinitebench",
        PAPER,
        "InfiniteBench",
        "InfiniteBench under InfLLM and streams by window",
        SETTINGS,
        source="InfLLM, its table of InfiniteBench",
        commands=(Command("suites", "--methods infllm@10 streaming_llm@10 lm_infinite@10"),),
        suite="infinitebench",
    ),
    Table(
        "infllm-retrieval",
        PAPER,
        "InfiniteBench, its retrieval tasks",
        "pass key, number, key and value under InfLLM and streams by window",
        SETTINGS,
        source="InfLLM, its table of InfiniteBench",
        commands=(
            Command(
                "compare",
                "--methods infllm@10 streaming_llm@10 lm_infinite@10 --no-controls "
                "--tasks passkey number_string kv_uuid --turns 1 --judge contains",
            ),
        ),
        differs="blocks as long as a short prompt allows: the published 128 at 128K",
    ),
)
