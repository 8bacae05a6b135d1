"""OmniKV: Hao, Zhu, Wang, Yu, Xin, Zheng, Ren, Guo, "OmniKV: Dynamic Context Selection for
Efficient Long-Context LLMs", ICLR 2025.

Budgets: at Mem 30% OmniKV's sparse layers read 6.67% of the prompt (Llama-3-8B-262K and Yi-9B-200K,
whose filter and wait layers make a quarter of the layers dense), at Mem 20% of the 70B 8.6%. Yi's
multi-step table has other filter layers: 13.8%, 26.2% and 38.5% at Mem 30%, 40% and 50%.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.paper.suites import TEN
from tools.paper.table import Command, Rows, Table

PAPER = "OmniKV (ICLR 2025)"
LLAMA, YI, LARGE = "llama-3-8b-262k", "yi-9b-200k", "llama-3.1-70b"
FILTERS = "filter layers {2, 8, 18} of 32, each with one wait layer"
THIRTY = f"Mem 30% = 6.67% of the prompt, {FILTERS}, one A100-80G"
GROUPS = ("single-doc", "multi-doc", "summary", "few-shot", "synthetic", "code", "average")
INFINITE = (*TEN, "average")
MAIN = "omnikv@6.67 omnikv_uniform@6.67 omnikv_exponential@6.67 h2o@30 infllm@30 streaming_llm@30"
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 6400)
DATA_SETS = tuple(f"longbench/{name}" for name in "2wikimqa qasper hotpotqa lcc qmsum".split())
BATCHES = ("128K x 16", "256K x 8", "512K x 4")


def rows(columns: Sequence[str], **methods: str) -> Rows:
    """Rows of figures in a line, in the order of the columns: "-" is not in the paper."""
    return {
        name: {
            column: float(word)
            for column, word in zip(columns, line.split(), strict=True)
            if word != "-"
        }
        for name, line in methods.items()
    }


LONG_LLAMA = rows(
    GROUPS,
    **{
        "full": "29.2 22.9 24.9 65.9 43.5 48.9 39.2",
        "h2o 30%": "27.7 20.2 23.8 62.9 42.7 43.3 36.8",
        "infllm 30%": "28.1 15.3 19.1 62.7 36.5 48.5 35.0",
        "streaming_llm 30%": "19.3 17.3 18.6 49.7 11.7 52.3 28.1",
        "omnikv_uniform 6.67%": "29.6 23.3 23.7 64.0 41.5 48.4 38.4",
        "omnikv_exponential 6.67%": "29.5 22.9 23.9 65.1 41.5 35.1 38.3",
        "omnikv 6.67%": "29.5 22.9 24.4 64.9 41.2 48.4 38.5",
    },
)
LONG_YI = rows(
    GROUPS,
    **{
        "full": "28.6 33.3 20.2 71.2 31.0 67.3 41.9",
        "h2o 30%": "26.0 33.5 17.5 68.7 31.1 66.6 40.6",
        "infllm 30%": "25.9 33.6 20.0 70.8 26.3 65.9 38.8",
        "streaming_llm 30%": "12.4 11.3 13.5 56.3 2.9 60.7 26.2",
        "omnikv_uniform 6.67%": "28.2 34.3 20.0 71.0 29.1 65.0 41.3",
        "omnikv_exponential 6.67%": "28.1 34.0 20.0 71.2 30.6 65.5 41.6",
        "omnikv 6.67%": "28.0 33.6 19.7 70.8 30.9 65.3 41.4",
    },
)
LONG_LARGE = rows(
    GROUPS,
    **{
        "full": "42.2 44.8 25.5 68.9 58.0 55.7 49.2",
        "h2o_plus 20%": "36.6 38.9 24.1 61.2 24.5 54.0 39.9",
        "infllm 20%": "39.3 36.1 18.4 62.5 41.1 39.8 39.5",
        "streaming_llm 20%": "16.7 12.3 18.7 45.6 7.5 61.1 27.0",
        "omnikv_uniform 8.6%": "40.8 43.8 23.6 67.7 57.7 53.8 47.9",
        "omnikv_exponential 8.6%": "42.0 44.3 24.6 68.4 57.6 55.2 48.7",
        "omnikv 8.6%": "42.0 44.3 24.7 68.2 57.6 54.8 48.6",
    },
)
INFINITE_LLAMA = rows(
    INFINITE,
    **{
        "full": "22.0 13.3 65.9 6.0 12.8 20.8 26.5 100 100 14.4 38.1",
        "h2o_plus 30%": "21.8 13.8 65.5 7.0 12.5 23.0 30.5 98.4 74.0 5.2 35.2",
        "infllm 30%": "17.3 9.3 44.5 4.0 17.7 29.1 24.5 100 100 0 34.6",
        "omnikv 6.67%": "22.5 12.7 65.5 5.0 12.6 20.0 26.5 100 100 9.6 37.4",
    },
)
INFINITE_YI = rows(
    ("kv_uuid", "average"),
    **{
        "full": "20.2 38.3",
        "h2o_plus 30%": "6.0 36.1",
        "infllm 30%": "0 32.9",
        "omnikv 6.67%": "19.8 38.2",
    },
)
TRADE = {
    f"omnikv {tokens:,} tokens": {"kv_uuid": kv, "average": average, "ms": ms}
    for tokens, average, kv, ms in zip(
        BUDGETS,
        (35.9, 36.4, 36.6, 36.9, 37.0, 37.1, 37.4),
        (1.0, 2.8, 5.8, 6.6, 7.6, 8.6, 9.6),
        (50.4, 51.9, 55.7, 62.5, 78.8, 95.5, 135.1),
    )
}
STEPS_YI = rows(
    ("2wikimqa", "hotpotqa", "two_stage_paper"),
    **{
        "full": "64.0 48.5 36.0",
        "h2o 30%": "55.5 45.5 13.0",
        "h2o 40%": "60.5 47.0 19.0",
        "h2o 50%": "64.0 50.0 26.0",
        "omnikv 13.8%": "58.0 51.0 14.0",
        "omnikv 26.2%": "62.0 51.0 32.0",
        "omnikv 38.5%": "64.0 50.0 31.0",
    },
)
# of table 8: the second of three filter layers moves; LongBench's average
SECOND = {4: 35.8, 5: 38.1, 7: 38.2, 8: 38.6, 9: 38.2, 10: 38.8, 11: 39.0, 12: 37.8, 13: 38.7}
PREFILL_COLUMNS = tuple(f"seconds at {n}K" for n in (256, 128, 64, 32, 16))
PREFILL = rows(
    PREFILL_COLUMNS,
    **{
        "r=1": "105.9 36.7 14.3 6.2 2.8",
        "r=2": "107.2 38.8 15.9 6.5 2.9",
        "r=4": "112.9 42.8 17.1 6.8 3.0",
        "r=8": "133.3 49.2 19.0 6.9 2.9",
        "minference": "61.6 28.1 13.0 6.5 3.7",
        "dense": "203.8 58.6 18.3 6.5 2.6",
    },
)
PREFILL_QUALITY = rows(
    GROUPS[:-1],
    **{
        "full": "29.2 22.9 24.9 65.9 43.5 48.9",
        "minference 30%": "29.2 22.4 25.3 65.8 41.0 49.8",
        "omnikv_prefill_r1 6.67%": "29.8 22.0 24.0 63.5 33.3 50.0",
        "omnikv_prefill_r2 6.67%": "30.0 23.1 24.3 65.1 40.0 49.6",
        "omnikv_prefill_r4 6.67%": "29.8 22.9 24.3 65.9 42.0 49.1",
        "omnikv_prefill_r8 6.67%": "29.8 22.9 24.3 65.9 42.0 49.0",
        "omnikv_uniform 6.67%": "29.6 23.3 23.7 64.0 41.5 48.4",
    },
)
FOUR_MS = rows(
    tuple(f"ms at {batch}" for batch in BATCHES),
    omnikv="46.2 44.9 44.9",
    lightllm="73.5 75.4 78.1",
    vllm="72.3 73.1 75.6",
)
FOUR_RATE = rows(
    tuple(f"tokens/s at {batch}" for batch in BATCHES),
    omnikv="345.9 177.5 89.1",
    lightllm="217.7 106.1 51.2",
    vllm="221.3 109.4 52.9",
)
EIGHT = rows(
    DATA_SETS,
    **{
        "omnikv 6.67%": "21.8 28.6 27.0 51.4 24.9",
        "omnikv_heads 6.67%": "21.7 28.0 27.3 52.3 25.9",
    },
)
SPEED = {
    "full": {"tokens/s at 128K": 12.5},
    "omnikv w1": {"tokens/s at 128K": 21.0},
    "omnikv-host w1 reuse 0.7": {"tokens/s at 450K": 7.5},
}

TABLES = (
    Table(
        "table1",
        PAPER,
        "Table 1",
        "LongBench by group under every method",
        f"{LLAMA} and {YI} at Mem 30%, {LARGE} at Mem 20%; {FILTERS}; up to 128K; A100-80G",
        {LLAMA: LONG_LLAMA, YI: LONG_YI, LARGE: LONG_LARGE},
        "paper, Table 1 (Tables 4 and 5 have it by data set)",
        commands=(Command("suites", f"--methods {MAIN}"),),
        suite="longbench",
        differs="groups are the means of their data sets that are there; the paper has 17 of them",
    ),
    Table(
        "table2",
        PAPER,
        "Table 2",
        "InfiniteBench's retrieval tasks: pass key, number, key and value",
        f"{LLAMA} and {YI}, 128K cut in the middle, {THIRTY}",
        {LLAMA: INFINITE_LLAMA, YI: INFINITE_YI},
        "paper, Table 2",
        commands=(
            Command(
                "compare",
                "--methods omnikv@6.67 h2o_plus@30 infllm@30 --tasks passkey number_string kv_uuid "
                "--turns 1 --judge contains",
            ),
        ),
        differs="three of the ten tasks, which are generated as InfiniteBench generates them; the "
        "seven others and the average need its files (table2-files --data DIR)",
    ),
    Table(
        "table2-files",
        PAPER,
        "Table 2",
        "InfiniteBench's ten tasks",
        f"{LLAMA} and {YI}, 128K cut in the middle, {THIRTY}",
        {LLAMA: INFINITE_LLAMA, YI: INFINITE_YI},
        "paper, Table 2",
        commands=(Command("suites", "--methods omnikv@6.67 h2o_plus@30 infllm@30"),),
        suite="infinitebench",
        differs="pass key, number, key and value are generated (tools.suites); code_run and "
        "math_calc run too and are not in the average, as in the paper",
    ),
    Table(
        "table3",
        PAPER,
        "Table 3, Figure 5",
        "what a budget in tokens buys: score and milliseconds a token",
        f"{LLAMA} at 128K, budgets of 128 to 6,400 tokens, {FILTERS}, one A100-80G, offloaded",
        {LLAMA: TRADE},
        "paper, Table 3",
        small=(2048,),
        commands=(
            Command(
                "compare",
                f"--methods omnikv@{','.join(f't{n}' for n in BUDGETS)} "
                "--tasks kv_uuid passkey --turns 1 --judge contains",
            ),
        ),
        differs="key and value by generated documents; the average needs InfiniteBench's files; ms "
        "of a bank on the device, where the paper's is in host memory",
    ),
    Table(
        "table6",
        PAPER,
        "Table 6, Figure 3",
        "2StageRetr: a sum, then what it is the key of",
        f"{YI} with filter layers {{3, 11, 30}} at Mem 30, 40 and 50% = 13.8, 26.2 and 38.5% of "
        "the prompt, chain of thought, 200 entries at most (mean 739 tokens); one A100-80G",
        {YI: STEPS_YI},
        "paper, Table 6",
        lengths=(739,),
        small=(739,),
        limit=40,
        commands=(
            Command(
                "compare",
                "--methods omnikv@13.8,26.2,38.5 h2o@30,40,50 --tasks two_stage_paper --turns 1 "
                "--judge contains",
            ),
        ),
        differs="2WikiMQA and HotpotQA need LongBench's files; addends, entries and colors are the "
        "paper's, its wording is not at hand",
    ),
    Table(
        "table7",
        PAPER,
        "Table 7",
        "without the selector (every layer comes over) and without the bank (a choice per layer)",
        f"{LLAMA} at 128K, {THIRTY}",
        {
            LLAMA: {
                "brutal_offload": {"average": 38.1, "ms": 569.4},
                "omnikv_per_layer 6.67%": {"average": 37.2, "ms": 184.4},
                "omnikv 6.67%": {"average": 37.4, "ms": 54.3},
            }
        },
        "paper, Table 7 (its 54.3 ms is not the 135.1 ms that Table 3 has at the same score)",
        commands=(
            Command(
                "compare",
                "--methods omnikv@6.67 omnikv_per_layer@6.67 brutal_offload --no-controls "
                "--tasks passkey kv_uuid --turns 1 --judge contains",
            ),
        ),
        differs="two generated tasks instead of InfiniteBench's average; ms of a bank on the "
        "device but for brutal_offload's",
    ),
    Table(
        "table8",
        PAPER,
        "Table 8, Figure 6c",
        "which layer is the second filter layer",
        f"{LLAMA}, filter layers {{2, n, 18}}, LongBench; Mem 30%",
        {
            LLAMA: {
                f"{{2, {n}, 18}} of 32 omnikv 6.67%": {"average": v} for n, v in SECOND.items()
            },
        },
        "paper, Table 8 (LongBench's average)",
        small=(512,),
        limit=8,
        commands=tuple(
            Command(
                "compare",
                f"--filters L2 L{n} L18 --methods omnikv@6.67 --no-controls --tasks kv passkey "
                "--turns 1 --judge contains",
                f"{{2, {n}, 18}} of 32",
            )
            for n in SECOND
        ),
        differs="two generated tasks instead of LongBench; on a model of another depth the layers "
        "stand at the same depths",
    ),
    Table(
        "table9",
        PAPER,
        "Table 9, Figure 9",
        "a model of 405 billion weights",
        "Llama-3.1-405B on several cards",
        {"llama-3.1-405b": {"full": {"qasper": 50.0, "qmsum": 25.5}}},
        "paper, Table 9",
        why="405 billion weights fit no card that this engine runs on (it uses one)",
    ),
    *(
        Table(
            name,
            PAPER,
            place,
            about,
            f"{LLAMA} in LightLLM, tensor parallel of 4 on A100s; batches of 16 at 128K, 8 at 256K "
            "and 4 at 512K; no CUDA graphs",
            {LLAMA: figures},
            f"paper, {place}",
            unit=unit,
            lengths=(131072, 262144, 524288),
            small=(1024, 2048, 4096),
            limit=12,
            commands=(Command("ranks", ""),),
            card=True,
            cards=4,
            differs="one sequence: no batch is timed over ranks; random weights of the model's "
            "shape; ranks are processes of a CPU, as many as it has cores, at most 4",
        )
        for name, place, about, unit, figures in (
            ("table10", "Table 10", "ms a token of batches over four cards", "ms", FOUR_MS),
            ("table11", "Table 11", "tokens a second of the same", "tokens/s", FOUR_RATE),
        )
    ),
    Table(
        "table12",
        PAPER,
        "Table 12",
        "quality where each of 8 ranks chooses by its own heads",
        f"{LLAMA} on LongBench, tensor parallel of 8 against 1, {THIRTY}",
        {LLAMA: EIGHT},
        "paper, Table 12 (tensor parallel of 8: omnikv_heads; of 1: omnikv)",
        commands=(Command("suites", "--methods omnikv@6.67 omnikv_heads@6.67"),),
        suite="longbench",
        differs="one card: with 8 K/V heads, eight ranks that choose by their own heads are a list "
        "for each K/V head, which omnikv_heads makes in one process",
    ),
    Table(
        "table13",
        PAPER,
        "Table 13",
        "seconds of a prompt: OmniKV-prefill by r, MInference, full attention",
        f"{LLAMA}, 16K to 256K, {FILTERS}, one H20",
        {LLAMA: PREFILL},
        "paper, Table 13",
        unit="seconds",
        lengths=(16384, 32768, 65536, 131072, 262144),
        small=(2048,),
        limit=2,
        commands=(Command("prefill", "--parts speed --ratios 1 2 4 8"),),
        card=True,
        differs="random weights of the model's shape, which take the same time; MInference is not "
        "in this program (tools.studies.prompts has its loss)",
    ),
    Table(
        "table14",
        PAPER,
        "Table 14",
        "quality of OmniKV-prefill on LongBench, by r",
        f"{LLAMA}, LongBench by group, {THIRTY}; r tokens chosen for each of a chunk, of 1, 2, 4, "
        "8 and all",
        {LLAMA: PREFILL_QUALITY},
        "paper, Table 14 (its row r = all is omnikv_uniform, as in Table 1)",
        commands=(
            Command(
                "suites",
                "--methods omnikv_prefill_r1@6.67 omnikv_prefill_r2@6.67 omnikv_prefill_r4@6.67 "
                "omnikv_prefill_r8@6.67 omnikv_uniform@6.67 minference@30",
            ),
        ),
        suite="longbench",
        differs="the paper gives neither its chunk (256 tokens here, the prompt's last 512 read "
        "densely) nor MInference's sizes (30% of the tokens here, one pattern for all heads); "
        "groups are the means of their data sets that are there",
    ),
    Table(
        "fig1a",
        PAPER,
        "Figure 1a",
        "attention mass that the choice of a layer keeps in the layers above it",
        f"{LLAMA}, 4,096 chosen tokens of a prompt, up to 4 steps a sample",
        source="paper, Figure 1a: curves without numbers",
        unit="share of the mass",
        line="similar",
        limit=4,
    ),
    Table(
        "fig1c",
        PAPER,
        "Figure 1c",
        "mass outside the prompt's 25% heavy hitters, step by step",
        f"{LLAMA}, the 25% of the prompt with the largest column sums kept",
        source="paper, Figure 1c: a curve without numbers",
        unit="share of the mass",
        line="heavy",
        limit=4,
        differs="one set a layer, by sums over all queries and heads",
    ),
    Table(
        "fig4",
        PAPER,
        "Figure 4, section 5.2",
        "tokens a second of an answer by context",
        f"{LLAMA}, 2,048 tokens, 4K to 450K, {FILTERS}, one A100-80G",
        {LLAMA: SPEED},
        "paper, section 5.2: 21.0 and 7.5 tokens/s; full attention's 12.5 from the stated 1.68x",
        unit="tokens a second",
        lengths=(4096, 32768, 131072, 460800),
        small=(2048, 4096),
        limit=5,
        commands=(
            Command(
                "bench",
                "--methods full,omnikv,omnikv-host,brutal --peers none "
                "--reuse 0.7 --no-append --no-gather --no-split -p none",
            ),
        ),
        card=True,
    ),
    Table(
        "fig4-three-cards",
        PAPER,
        "Figure 4, section 5.2",
        "one card with a bank in host memory beside full attention on three cards",
        f"{LLAMA} at 450K, {FILTERS}: one A100-80G, and three for full attention's rows",
        {
            LLAMA: {
                "full": {"tokens/s at 450K": 4.0},
                "omnikv-host w1 reuse 0.7": {"tokens/s at 450K": 7.5},
            }
        },
        "paper, section 5.2: 7.5 tokens/s, 1.87 times full attention on three cards, so 4.0",
        unit="tokens a second",
        lengths=(460800,),
        small=(4096,),
        limit=5,
        commands=(
            Command(
                "bench",
                "--methods full,omnikv-host --peers none --reuse 0.7 --no-append --no-gather "
                "--no-split -p none",
            ),
        ),
        card=True,
        cards=3,
        differs="full attention on one device: layers over three would wait for each other, and "
        "a hidden vector crosses twice a token",
    ),
    Table(
        "fig6a",
        PAPER,
        "Figure 6a",
        "whether the mass that a choice keeps depends on the task",
        f"{LLAMA} and {YI}, several data sets; the curves are alike",
        source="paper, Figure 6a: curves without numbers",
        unit="share of the mass",
        line="by_task",
        limit=8,
        differs="four kinds of generated documents",
    ),
    Table(
        "fig6b",
        PAPER,
        "Figure 6b",
        "share of a layer's choice that lies in the passage with the answer",
        f"{LLAMA} and {YI}, CLongEval; peaks at layers that filter (8 of 32, 14 of 48)",
        source="paper, Figure 6b: curves without numbers",
        unit="share of the choice",
        line="hits",
        limit=6,
        differs="generated documents, whose evidence is a line; CLongEval's is a passage",
    ),
    Table(
        "fig7",
        PAPER,
        "Figure 7",
        "needles by depth and length, over a bank in host memory",
        "llama-3-8b-1048k, 1,024 tokens, filter layers {2, 8, 18}, to 450K on one A100-80G",
        {
            "llama-3-8b-1048k": {
                "omnikv on the host": {"all": 100.0},
            }
        },
        "paper, Figure 7 and section 5.2: every needle found",
        lengths=(131072, 262144, 460800),
        small=(1024, 2048, 4096),
        limit=15,
        line="needles",
    ),
    Table(
        "fig8",
        PAPER,
        "Figure 8",
        "mass of a layer above that the choice of a filter layer holds",
        f"{LLAMA}, HotpotQA, 2,048 chosen tokens: layer 8's choice, layer 20's mass",
        {LLAMA: {"choice at 8/32 of the depth": {"mass at 20/32 of the depth": 0.87}}},
        "paper, section D.7 and Figure 8",
        unit="share of the mass",
        line="depths",
        limit=4,
        differs="generated documents; on a model of another depth layers at the same depths; a "
        "budget of 6.67%",
    ),
)
