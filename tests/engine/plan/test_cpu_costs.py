"""The costs behind `dense_below="auto"` and what they choose, for sets that this machine may lack.

Stops: a constant below what was measured, a crossover that chooses the slower method.
"""

import json
from pathlib import Path

import pytest

from engine.methods.omnikv.method import OmniKV
from engine.plan.cpu_costs import COSTS, NATIVE, cpu_costs
from kernels.launch.isa import SETS
from kernels.native import library
from tools.bench.shapes import shape_config, shape_filters

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
TABLES = {
    compiled: json.loads((RESULTS / name).read_text())["results"]
    for compiled, name in (
        (False, "cpu-forms-zen4-after.json"),
        (True, "cpu-forms-native-zen5.json"),
    )
}
ROWS, READ = 16384, 2048 + 256  # of the table's bank, and of its sparse layer


# "avx512_vnni" is no set to those who ask isa()
COMPILED = set(SETS) & set(library.SETS)


@pytest.mark.parametrize(
    "compiled, found", [(compiled, found) for compiled in TABLES for found in TABLES[compiled]]
)
@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_no_cost_is_below_what_was_measured(compiled, found, dtype, itemsize):
    seconds = {name: row[dtype] for name, row in TABLES[compiled][found]["seconds"].items()}
    costs, dense = cpu_costs(itemsize, found, compiled=compiled), seconds["dense layer"]
    assert seconds["filter layer"] / dense <= costs.filter
    assert (seconds["sparse layer"] / READ) / (dense / ROWS) <= costs.row


def test_every_set_but_the_one_that_was_never_met_is_measured():
    assert set(TABLES[False]) == set(COSTS) == set(SETS) - {"amx"}
    assert set(TABLES[True]) == set(NATIVE) - {"amx"} == COMPILED - {"amx"}


@pytest.mark.parametrize(
    "shape, itemsize, expected, compiled",
    [
        ("pocket", 2, (10834, 11221, 10379, 10379, 8590), 5243),
        ("160m", 2, (13135, 12096, 10873, 10873, 9335), 5248),
        ("llama-3.2-1b", 2, (9995, 10951, 10285, 10285, 8349), 4590),
        ("llama-3.2-1b", 4, (7796, 9328, 9328, 9328, 8173), 4425),
    ],
)
def test_the_choice_of_every_set(shape, itemsize, expected, compiled, monkeypatch):
    """expected: without our C++ kernels in every set; compiled: with them."""
    config = shape_config(shape)
    method = OmniKV(filter_layers=shape_filters(shape), wait_layers=0)

    def below(found, missing):
        monkeypatch.setattr("engine.plan.cpu_costs.isa", lambda: found)
        monkeypatch.setattr("engine.plan.cpu_costs.missing", lambda: missing)
        return method.dense_below_tokens(method.plan(config), config, itemsize, "cpu", 131072)

    for found, tokens in zip(SETS, expected, strict=True):
        assert below(found, "no compiler") == tokens, found
    assert {below(found, "") for found in COMPILED} == {compiled}
