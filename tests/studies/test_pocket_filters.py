"""Filter layers by brute force: every set is scored; the best has the most sparse layers
of those that lose nothing.
"""

from engine import LLM, Full
from tests.tools.conftest import tiny  # noqa: F401
from tools.studies.pocket.filters import best, candidates, score


def test_every_set_is_scored_beside_full_attention(tiny):  # noqa: F811
    settings = {"full": Full()} | candidates(6, 1, [0, 1], 0.05)
    assert settings["2 wait 1"].filter_layers == (2,) and "4 wait 1" not in settings
    llm = LLM(str(tiny), device="cpu", dtype="float32", threads=1, method=Full())
    table = score(llm, settings, ("kv",), 300, 1, 2)
    assert all(row["kv"][1] == 2 for row in table.values()) and set(table) == set(settings)


def test_the_best_loses_nothing_and_is_the_sparsest():
    settings = {"full": Full()} | candidates(6, 2, [0], 0.05)
    table = {name: {"kv": [7, 10]} for name in settings}
    assert best(table, settings, 6) == "0 wait 0"
    table["0 wait 0"] = {"kv": [6, 10]}
    assert best(table, settings, 6) == "1 wait 0"  # as sparse as {0, 1}, of fewer filters
