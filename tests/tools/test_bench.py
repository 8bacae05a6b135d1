"""`make bench`: the figures it prints are those of the path that users run, its floors are counted,
its last line is JSON.
"""

import csv
import io
import json
import sys

import pytest
import torch

import engine.methods.base
import engine.plan.placement
from engine import LLM, Full, OmniKV
from engine.base.errors import SettingError
from engine.base.figures import brief
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.omnikv import OmniKVRuntime
from engine.methods.registry import methods
from engine.plan.layers import Role
from engine.plan.placement import part_bytes
from engine.runner.step_runner import StepRunner
from tools.bench import cli as bench
from tools.bench import gather as bench_gather
from tools.bench import suite as bench_suite
from tools.bench.allowed import FIXED, RUNG, SHALLOW, allowed, ladder
from tools.bench.floor import (
    Rates,
    StepBytes,
    floor_seconds,
    measure_rates,
    step_bytes,
    streamed_weights,
)
from tools.bench.methods import specs
from tools.bench.run import (
    Cell,
    Engine,
    Entrant,
    Match,
    Mismatch,
    _turn,
    engine_bytes,
    fetched_bytes,
)
from tools.bench.shapes import SHAPES, parse_size, shape_config, shape_filters, short_size
from tools.bench.split import STAGES, split_step
from tools.bench.suite import sharp_stream
from tools.bench.verify import verify
from tools.common.program import POCKET
from tools.common.synthetic_bank import synthesize

TINY = [
    "--shape",
    "tiny",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "-d",
    "600",
    "-p",
    "64",
    "-r",
    "2",
    "-n",
    "2",
    "--tokens",
    "32",
    "--no-gather",
]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    monkeypatch.setattr(bench_suite, "measure_rates", lambda *_, **__: Rates(10e9, 8e9))


def tiny_llm(method=None, context=3000, offload="device"):
    return LLM.from_stream(
        shape_config("tiny"),
        sharp_stream,
        device="cpu",
        dtype="float32",
        max_context=context,
        method=method or Full(),
        offload=offload,
    )


def omnikv(**more):
    return OmniKV(
        **{
            "filter_layers": (1, 3),
            "tokens": 32,
            "tail": 64,
            "wait_layers": 0,
            "dense_below": 0,
            **more,
        }
    )


def run(capsys, *arguments):
    code = bench.main([*TINY, *arguments])
    out = capsys.readouterr().out
    return code, out, json.loads(out.strip().splitlines()[-1])


# ---------------------------------------------------------------- the program


def test_table_and_json_of_a_whole_run(capsys, tmp_path):
    code, out, data = run(capsys, "--peers", "none", "--save", str(tmp_path / "run.json"))
    assert code == 0 and data["failed_checks"] == 0
    assert (
        "| method " in out
        and "tg @ d600" in out
        and "pp64" in out
        and "split of a step" in out
        and "planned" in out
    )
    assert json.loads((tmp_path / "run.json").read_text())["cells"] == data["cells"]
    names = {c["name"]: c for c in data["cells"] if c["test"] == "tg"}
    assert set(names) == {"full", "omnikv w1", "omnikv w0"}
    for c in names.values():
        assert (
            c["samples"] == 4
            and c["ms_median"] > 0
            and 0 < c["share_of_floor"]
            and c["checked"]["largest_logit_difference"] < 1e-2
        )
        assert (
            c["counted_kv_bytes"]
            == c["predicted_kv_bytes"]
            == c["bytes"]["dense"] + c["bytes"]["sparse"]
        )
    assert (
        names["omnikv w0"]["bytes"]["sparse"]
        > names["omnikv w1"]["bytes"]["sparse"]
        > 0
        == names["full"]["bytes"]["sparse"]
    )
    assert names["omnikv w0"]["vs_full"] == pytest.approx(
        names["full"]["ms_median"] / names["omnikv w0"]["ms_median"]
    )
    assert names["omnikv w0"]["bytes_allow"] == pytest.approx(
        names["full"]["floor_ms"] / names["omnikv w0"]["floor_ms"]
    )
    for word in ("commit", "hardware", "packages", "threads", "flags", "measured"):
        assert word in data["header"]


def test_csv_and_jsonl(capsys):
    _, out, data = run(capsys, "--peers", "none", "--no-split", "--methods", "full", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(out.strip().rsplit("\n\n", 1)[0])))
    assert [r["test"] for r in rows] == [c["test"] for c in data["cells"]]
    _, out, data = run(capsys, "--peers", "none", "--no-split", "--methods", "full", "-o", "jsonl")
    assert [json.loads(line) for line in out.strip().splitlines()[:-1]] == data["cells"]


def test_missing_peers_say_why_in_their_cells(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, out, data = run(capsys, "--methods", "full", "--no-split")
    whys = {c["name"]: c["why"] for c in data["cells"] if c["why"]}
    assert (
        code == 0
        and "not installed" in whys["transformers"]
        and "not installed" in whys["llama.cpp"]
    )
    assert "transformers tg @ d600: transformers is not installed" in out


def test_transformers_beside_us(capsys):
    pytest.importorskip("transformers")
    _, _, data = run(capsys, "--methods", "full", "--peers", "transformers", "--no-split")
    cells = {(c["name"], c["test"]): c for c in data["cells"]}
    assert (
        cells["transformers", "tg"]["ms_median"] > 0
        and cells["transformers", "pp64"]["ms_median"] > 0
    )
    assert (
        cells["full", "tg"]["vs_transformers"] > 0
        and "cache" in cells["transformers", "tg"]["settings"]
    )


def test_llamacpp_beside_us(capsys):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    _, _, data = run(
        capsys, "--methods", "full", "--peers", "llama.cpp", "--no-split", "-d", "1024"
    )
    cells = {(c["name"], c["test"]): c for c in data["cells"]}
    assert cells["llama.cpp", "tg"]["ms_median"] > 0 and cells["full", "tg"]["vs_llama.cpp"] > 0


def test_a_wrong_path_is_not_timed(capsys, monkeypatch):
    right = engine.methods.omnikv.runtime.decode_sparse

    def wrong(*arguments, backend="auto", **named):
        out = right(*arguments, backend=backend, **named)
        return out if backend == "reference" else out.roll(1, -1)

    monkeypatch.setattr(engine.methods.omnikv.runtime, "decode_sparse", wrong)
    monkeypatch.setattr(OmniKVRuntime, "chained", lambda *_: None)  # else C++ calls the kernel
    code, out, data = run(capsys, "--peers", "none", "--no-split")
    cells = {c["name"]: c for c in data["cells"] if c["test"] == "tg"}
    assert code == 1 and data["failed_checks"] == 2
    assert "ms_median" in cells["full"] and "ms_median" not in cells["omnikv w0"]
    assert "the timed path" in cells["omnikv w0"]["why"] and cells["omnikv w0"]["why"] in out


def test_what_does_not_fit_prints_the_bytes(capsys, monkeypatch):
    monkeypatch.setattr(bench_suite, "available_bytes", lambda device: (9_000_000, "free RAM"))
    code, _, data = run(capsys, "--peers", "none", "--no-split", "-d", "64,32768", "-p", "none")
    cells = {(c["name"], c["n"]): c for c in data["cells"] if c["test"] == "tg"}
    assert code == 0 and "ms_median" in cells["full", 64]
    assert "needs" in cells["full", 32768]["why"] and "MB" in cells["full", 32768]["why"]


def test_time_that_is_over_is_said(capsys):
    _, _, data = run(capsys, "--peers", "none", "--seconds", "0.001")
    assert all("left out" in c["why"] for c in data["cells"])


def test_usage_errors(capsys):
    assert bench.main([*TINY, "--methods", "omnikw"]) == 2
    assert "found 'omnikw', expected full" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        bench.main(["--contexts", "4Q"])
    assert stop.value.code == 2


def test_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    run(capsys, "--peers", "none", "--no-split", "--plot", str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"latency.png", "speedup.png", "memory.png"}


# ---------------------------------------------------------------- floors


def test_floor_of_llama_3_8b_is_the_published_arithmetic():
    config = shape_config("llama-3-8b")
    assert streamed_weights(config, 2) == pytest.approx(15.01e9, rel=1e-3)
    filters = shape_filters("llama-3-8b")
    method = OmniKV(filter_layers=filters, tokens=2048, dense_below=0, wait_layers=1)
    layers = method.plan(config)
    chosen = [2048 + 256 if role is Role.SPARSE else 131072 for role in layers.roles]
    full, sparse = (
        step_bytes(config, 2, Full().plan(config), 131072, [131072] * 32),
        step_bytes(config, 2, layers, 131072, chosen),
    )
    assert full.floor / 4.3e12 == pytest.approx(7.49e-3, rel=2e-3)
    assert sparse.floor / 4.3e12 == pytest.approx(4.54e-3, rel=4e-3)
    assert full.floor / sparse.floor == pytest.approx(1.65, abs=0.01)
    assert sparse.sparse == 24 * (2048 + 256) * 4096 and sparse.dense == 8 * 131072 * 4096
    assert sparse.scoring > 0 == full.scoring
    dense = step_bytes(config, 2, layers, 131072, [131072] * 32)  # below the crossover
    assert dense.floor == full.floor and dense.scoring == 0


def test_floor_takes_the_slower_of_memory_and_link():
    config = shape_config("tiny")
    needed = step_bytes(config, 4, Full().plan(config), 100, [100] * config.num_layers)
    assert floor_seconds(needed, Rates(1e9, 1e9)) == needed.floor / 1e9
    assert floor_seconds(needed, Rates(1e9, 1e9, 1e6), fetched=10**6) == 1.0


def test_tied_weights_stream_their_embedding():
    tied, untied = shape_config("llama-3.2-1b"), shape_config("160m")
    assert streamed_weights(tied, 2) == 2 * tied.parameters
    assert streamed_weights(untied, 2) == 2 * (
        untied.parameters - (untied.vocab_size - 1) * untied.hidden_size
    )


@pytest.mark.parametrize("n", [40, 64, 300, 1000])
def test_predicted_bytes_are_those_that_a_step_counts(n):
    llm = tiny_llm()
    for method in (
        Full(),
        omnikv(),
        omnikv(wait_layers=1),
        omnikv(tokens=None, share=0.2),
        omnikv(dense_below=500),
    ):
        with llm.session(method) as session:
            synthesize(session, n)
            before = session.stats
            session.decode(1)
            after = session.stats
        needed = engine_bytes(LLM.sharing(llm, method=method, offload="device"), n + 1, n)
        assert (
            after.bytes_read_sparse
            - before.bytes_read_sparse
            + after.bytes_read_dense
            - before.bytes_read_dense
            == needed.dense + needed.sparse
        )


def test_what_bytes_allow_is_the_fixed_part_and_a_price_for_each_byte():
    """A byte costs what OmniKV's cost above the fixed part; depths stand apart."""

    def cell(name, n, ms, dense, choosing=0):
        return Cell(name, "tg", n, needed=StepBytes(10, dense, 0, 0, choosing), seconds=[ms * 1e-3])

    cells = [
        cell("omnikv w1", 4096, 6.0, 4000),
        cell("omnikv w0", 4096, 9.0, 4000),
        cell("quest", 4096, 6.0, 1000, 1000),
        cell("full", 8192, 7.0, 9000),
        cell(FIXED, SHALLOW, 2.0, 0),
        Cell("slow", "tg", 4096, why="left out"),
    ]
    first, second, quest = allowed(cells)
    assert [row.name for row in (first, second, quest)] == ["omnikv w1", "omnikv w0", "quest"]
    assert (first.ratio, second.ratio) == (1.0, pytest.approx(1.5))
    assert (quest.read, quest.choosing) == (2000, 1000)
    assert quest.allowed == pytest.approx(4e-3) and quest.ratio == pytest.approx(1.5)
    assert not allowed(cells[:-2]) and not allowed(cells[2:])
    # full attention has taken 2 ms over nothing and 7 over 9,000 bytes
    assert quest.alike == pytest.approx(2e-3 + 5e-3 * 2000 / 9000)


def test_a_byte_has_the_price_that_full_attention_pays_at_that_size():
    """Between two depths, at one of them, and beyond the last; a depth that was timed twice."""

    def cell(name, n, ms, read):
        return Cell(name, "tg", n, needed=StepBytes(10, read, 0), seconds=[ms * 1e-3])

    full = [cell(f"{RUNG}512", 512, 3.0, 1000), cell(f"{RUNG}512", 512, 5.0, 1000)]
    methods = [
        cell("omnikv w0", 4096, 6.0, 1500),
        cell("at", 4096, 4.0, 1000),
        cell("more", 4096, 60.0, 4000),
        cell("less", 4096, 3.0, 500),
    ]
    cells = [cell(FIXED, SHALLOW, 2.0, 0), *full, *methods, cell(f"{RUNG}1024", 1024, 10.0, 2000)]
    rows = {row.name: row for row in allowed(cells)}
    assert set(rows) == {"omnikv w0", "at", "more", "less"}
    own = {name: row.own for name, row in rows.items()}
    assert own["at"] == pytest.approx(1.0)  # 4 ms, the mean of 3 and 5
    assert own["less"] == pytest.approx(3 / 3)  # half of the way from 2 to 4
    assert own["omnikv w0"] == pytest.approx(6 / 7)  # half of the way from 4 to 10
    assert own["more"] == pytest.approx(60 / 22)  # 6 ms for each thousand bytes beyond
    assert rows["omnikv w0"].ratio == 1.0
    alone = [cell(FIXED, SHALLOW, 2.0, 0), *methods]
    assert all(row.own is None for row in allowed(alone))
    assert (
        ladder(8192) == [512, 1024, 2048, 4096] and ladder(128) == [] and ladder(300) == [75, 150]
    )


def test_the_table_of_what_bytes_allow(capsys):
    """Bytes to choose are counted too; the depth of the fixed part is its own."""
    methods = ["--methods", "omnikv", "omnikv_per_layer", "quest", "snapkv", "--wait-layers", "0"]
    flags = "--peers", "none", "-p", "none", "--allowed", "--no-append", *methods
    code, out, data = run(capsys, *flags)
    rows = [line for line in out.splitlines() if "| tg @ d600 |" in line]
    assert code == 0 and len(rows) == 9 and out.count("beside omnikv's bytes") == 1
    assert sum(line.startswith("| full at ") for line in out.splitlines()) == 8
    found = {row["name"]: row for row in data["allowed"]}
    config, chosen = shape_config("tiny"), (602 - 1) // 16
    side = config.kv_bytes(4) // 2
    assert found["omnikv w0"]["ratio"] == 1.0 and found["snapkv"]["choosing"] == 0
    first = (shape_filters("tiny") or (0,))[0]
    assert found["omnikv_per_layer"]["choosing"] == (config.num_layers - first) * 602 * side
    assert found["quest"]["choosing"] == (config.num_layers - 2) * 2 * chosen * side


def test_every_named_method_has_its_row(capsys):
    """Each counts the bytes that were predicted before it was timed; names may stand apart."""
    # a random model has no gates or scores, and no pass has repeated a synthetic bank
    names = sorted(set(methods()) - {"omnikv", "double_sparsity", "duo", "razor", "kvzip"})
    flags = ["--peers", "none", "--no-split", "-p", "none", "-r", "1", "-n", "1"]
    flags += ["--tokens", "64"]  # VaSE's window
    code, _, data = run(capsys, *flags, "--methods", "omnikv,full", *names)
    cells = {c["name"]: c for c in data["cells"] if c["test"] == "tg"}
    assert code == 0 and set(cells) == {"omnikv w1", "omnikv w0", *names}
    for c in cells.values():
        assert c["why"] == "" and c["counted_kv_bytes"] == c["predicted_kv_bytes"], c
    whole = cells["full"]["counted_kv_bytes"]
    read_all = {"full", "brutal_offload", "minference", "quoka", "xattention"}
    read_all |= {"infllm", "em_llm", "pod_untrained"}
    read_all |= {"random_eviction"}  # until an answer is longer than its budget
    # until they have the tokens of which they make centroids or clusters, or a mean key
    read_all |= {"a2ats", "pqcache", "magicpig", "retroinfer"}
    read_all |= {"fastgen"}  # random rows, of which no head can do without one
    assert {name for name, c in cells.items() if c["counted_kv_bytes"] == whole} == read_all


@pytest.mark.parametrize("names", [("snapkv",), ("full", "snapkv", "quest")])
def test_a_method_that_cannot_run_says_so_in_one_line(capsys, names):
    """SnapKV's window is larger than the budget: no name is timed, and nothing is a traceback."""
    assert bench.main([*TINY, "--peers", "none", "--tokens", "8", "--methods", *names]) == 2
    (said,) = [li for li in capsys.readouterr().err.splitlines() if li.startswith("error: ")]
    assert "snapkv" in said and "tokens: found 8" in said


def test_host_tier_and_brutal_offload_beside_the_device(capsys):
    _, out, data = run(
        capsys,
        "--peers",
        "none",
        "--methods",
        "full,omnikv-host,brutal",
        "--reuse",
        "0,0.9",
        "--wait-layers",
        "0",
        "-d",
        "2000",
        "--no-split",
    )
    cells = {c["name"]: c for c in data["cells"] if c["test"] == "tg"}
    assert set(cells) == {"full", "omnikv-host w0 reuse 0", "omnikv-host w0 reuse 0.9", "brutal"}
    assert all("ms_median" in c for c in cells.values()), cells
    assert (
        cells["omnikv-host w0 reuse 0"]["hit_rate"] < 0.05
        and abs(cells["omnikv-host w0 reuse 0.9"]["hit_rate"] - 0.9) < 0.05
    )
    assert (
        cells["brutal"]["fetched_bytes_per_token"] >= 0.9 * cells["brutal"]["fetched_predicted"] > 0
    )
    for c in ("omnikv-host w0 reuse 0", "omnikv-host w0 reuse 0.9"):
        assert cells[c]["fetched_bytes_per_token"] == pytest.approx(
            cells[c]["fetched_predicted"], rel=0.2
        )
    appended = {c["name"]: c for c in data["cells"] if c["test"] == "pp1024 @ d2000"}
    # a second turn, once per depth: the past of three layers comes back for it
    (first,) = appended.values()
    assert first["name"] in cells and first["streamed_bytes"] >= 2000 * 3 * shape_config(
        "tiny"
    ).kv_bytes(4)
    assert "link_seconds" not in first and "from host memory" in out


def test_nothing_is_fetched_on_the_device():
    assert fetched_bytes(tiny_llm(omnikv()), 1000) == 0
    host = tiny_llm(omnikv(), offload="host")
    assert fetched_bytes(host, 1000) == 3 * 32 * host.config.kv_bytes(4)


def test_measured_rates_are_plausible():
    rates = measure_rates("cpu", 2**22, seconds=0.05)
    assert (
        1e8 < rates.copy <= rates.read < 1e13 and rates.h2d is None and "h2d" not in rates.to_dict()
    )


# ---------------------------------------------------------------- rounds and checks


class Fake:
    settings = "fake"

    def __init__(self, name, log, fails=None):
        self.name, self.log, self.fails = name, log, fails
        log.append(f"make {name}")

    def rewind(self):
        self.log.append(f"rewind {self.name}")

    def step(self):
        if self.fails:
            raise RuntimeError(self.fails)

    def close(self):
        self.log.append(f"close {self.name}")


def test_rounds_alternate_and_everything_is_closed():
    log = []
    match = Match([Entrant(n, lambda n=n: Fake(n, log)) for n in "ab"], "cpu", room=100)
    match.run(3, 2)
    assert [line for line in log if line.startswith("rewind")] == [f"rewind {n}" for n in "abbaab"]
    assert {n: len(t) for n, t in match.times.items()} == {"a": 6, "b": 6}
    assert sorted(line for line in log if not line.startswith("rewind")) == [
        "close a",
        "close b",
        "make a",
        "make b",
    ]


def test_what_does_not_fit_together_takes_turns():
    log = []
    match = Match([Entrant(n, lambda n=n: Fake(n, log), bytes=60) for n in "ab"], "cpu", room=100)
    match.run(2, 1)
    assert not match.together
    assert [line for line in log if "rewind" not in line] == [
        f"{what} {n}" for n in "abba" for what in ("make", "close")
    ]


def test_one_that_fails_leaves_with_its_reason():
    log = []
    match = Match(
        [
            Entrant("a", lambda: Fake("a", log, "llama_decode returned 1")),
            Entrant("b", lambda: Fake("b", log)),
        ],
        "cpu",
        100,
    )
    match.run(2, 1)
    assert (
        match.failed == {"a": "RuntimeError: llama_decode returned 1"}
        and match.times["a"] == []
        and len(match.times["b"]) == 2
    )


def test_verify_agrees_with_itself_and_restores_the_session():
    contestant = Engine("omnikv", tiny_llm(omnikv()), 700)
    facts = verify(contestant)
    assert (
        facts["largest_logit_difference"] < 1e-2
        and facts["selections_agree"] > 0.95
        and contestant.session.method == omnikv()
    )
    assert len(contestant.session) == 700 and contestant.session.backend == "auto"


def test_verify_sees_a_wrong_selection(monkeypatch):
    right = engine.methods.base.select_topk

    def wrong(scores, *arguments, backend="auto", **named):
        return right(
            scores if backend == "reference" else -scores, *arguments, backend=backend, **named
        )

    monkeypatch.setattr(engine.methods.base, "select_topk", wrong)
    monkeypatch.setattr(OmniKVRuntime, "chained", lambda *_: None)  # else C++ calls the kernel
    contestant = Engine("omnikv", tiny_llm(omnikv()), 700)
    with pytest.raises(Mismatch, match="selection at 700 tokens"):
        verify(contestant)
    assert (
        contestant.session.backend == "auto"
        and contestant.session.method == omnikv()
        and len(contestant.session) == 700
    )


def test_a_contestant_runs_ahead_where_answers_do(monkeypatch):
    """The same tokens; and the step after the clock's start, which waits for none, is not timed."""
    engines = [Engine("full", tiny_llm(Full()), 200) for _ in range(2)]
    plain = [engines[0].step() for _ in range(4)]
    monkeypatch.setattr(StepRunner, "runs_ahead", lambda runner, n: True)
    seconds = _turn(engines[1], 2, torch.device("cpu"), 1, iter(range(100)).__next__)
    assert engines[1].session.ids == engines[0].session.ids and len(engines[1].session) == 204
    assert seconds == [1, 1] and engines[1].token == plain[2]


def test_statistics_of_a_cell():
    c = Cell("x", "tg", 10, seconds=[0.1, 0.2, 0.1, 0.1, 0.1])
    assert c.median == 0.1 and c.p95 == 0.2 and c.noisy and c.rate[0] == pytest.approx(9)
    assert Cell("x", "tg", 10).to_dict()["test"] == "tg" and Cell("x", "tg", 10).median is None


def test_split_adds_up_and_names_its_stages():
    for method, stages in (
        (Full(), {"linear", "dense attention"}),
        (omnikv(), {"linear", "dense attention", "top-k", "sparse attention"}),
    ):
        contestant = Engine("x", tiny_llm(method), 2000)
        row = split_step(contestant)
        assert sum(row[stage] for stage in STAGES) == pytest.approx(row["step"])
        assert all(row[stage] > 0 for stage in stages) and row["other"] > 0 and row["gather"] == 0
        assert 2000 <= len(contestant.session) < 2010
    # nothing stays wrapped
    assert engine.methods.omnikv.runtime.decode_sparse.__name__ == "decode_sparse"


@pytest.mark.parametrize(
    "method", [BrutalOffload(layers=4, ahead=1), omnikv(), Full()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("block", [65536, 512])
def test_split_counts_what_comes_back_from_the_host(method, block, monkeypatch):
    """Whole layers (brutal offload, full attention), their blocks, and fetched selections; none of
    them twice.
    """
    monkeypatch.setattr(engine.plan.placement, "STREAM_BLOCK", block)
    contestant = Engine(
        "x", tiny_llm(omnikv() if method == Full() else method, offload="host"), 2000
    )
    contestant.session.set_method(method)
    streamed = contestant.session.stats.bytes_streamed
    row = split_step(contestant, steps=1)
    assert row["gather"] > 0 and row["dense attention"] > 0 and row["other"] > 0
    assert sum(row[stage] for stage in STAGES) == pytest.approx(row["step"])
    # under OmniKV the rings' tails only, which is less than a layer
    layer = 2000 * part_bytes(contestant.session.loaded.config, 4)
    came = contestant.session.stats.bytes_streamed - streamed
    assert (came >= layer) == (type(method) is not OmniKV)


# ---------------------------------------------------------------- words


def test_sizes():
    assert [parse_size(t) for t in ("4K", "1m", "131072")] == [4096, 1048576, 131072]
    assert [short_size(n) for n in (4096, 1048576, 450000)] == ["4K", "1M", "450000"]
    for bad in ("", "K", "4.5K", "-1", "0"):
        with pytest.raises(ValueError, match="number of tokens"):
            parse_size(bad)


def test_shapes_and_methods():
    for name in SHAPES:
        config, filters = shape_config(name), shape_filters(name)
        assert filters[-1] < config.num_layers
    assert shape_config("llama-3-8b").parameters == pytest.approx(8.03e9, rel=1e-3)
    assert {"full", "omnikv", "brutal_offload", "h2o"} <= set(methods()) and not {
        "replay",
        "method",
        "evicting",
    } & set(methods())
    found = specs(("full", "omnikv", "omnikv-host"), (1, 3), 32, (1, 0), (0.0, 0.9))
    assert [s.label for s in found] == [
        "full",
        "omnikv w1",
        "omnikv w0",
        "omnikv-host w1 reuse 0",
        "omnikv-host w1 reuse 0.9",
        "omnikv-host w0 reuse 0",
        "omnikv-host w0 reuse 0.9",
    ]
    assert found[-1].method.reuse == 0.9 and found[-1].offload == "host"
    assert (
        brief(found[1].method)
        == "OmniKV(filter_layers=(1, 3), tokens=32, wait_layers=1, dense_below=0)"
    )
    with pytest.raises(SettingError, match="methods: found 'nothing'"):
        specs(("nothing",), (1,), 32, (1,), (None,))


def test_what_lies_beside_the_weights_is_taken():
    """Gates, scores and channels of the shipped model; without a folder a method has none."""
    names = ("duo", "razor", "double_sparsity")
    given = names, None, 64, (0,), (None,)
    duo, razor, double = (spec.method for spec in specs(*given, folder=POCKET))
    assert len(duo.gates) == len(razor.heads[0]) == len(double.channels) == 8
    duo, razor, double = (spec.method for spec in specs(*given))
    assert duo.gates is razor.heads is double.channels is None


def test_default_run_is_sane():
    chosen = bench.options(bench.parser().parse_args(["--device", "cpu"]))
    assert (
        chosen.shape == "160m"
        and chosen.contexts == (4096, 8192, 16384, 32768)
        and chosen.seconds == bench.CPU_SECONDS
    )
    assert [s.label for s in chosen.specs] == [
        "full",
        "omnikv w1",
        "omnikv w0",
    ] and torch.get_num_threads() >= 1


# ---------------------------------------------------------------- rows from host memory


@pytest.mark.parametrize(
    "rows, row, pitch", [(1, 16, 16), (64, 64, 64), (65, 256, 768), (127, 4096, 4096)]
)
def test_every_way_brings_the_chosen_rows(rows, row, pitch):
    link, found = bench_gather.compare("cpu", ((row, pitch),), rows, rounds=2)
    assert [r["way"] for r in found] == list(bench_gather.WAYS) and "ordinary memory" in link
    assert all(r["us"] > 0 and r["on"] == "cpu" for r in found)
    kernel, contiguous, _, single = found
    assert contiguous["of_contiguous"] == single["vs_single"] == 1
    assert kernel["of_contiguous"] == pytest.approx(kernel["gb_per_s"] / contiguous["gb_per_s"])
    assert kernel["gb_per_s"] == pytest.approx(rows * row / kernel["us"] / 1e3)


def test_a_gather_of_other_rows_is_not_timed(monkeypatch):
    right = bench_gather.move_rows
    monkeypatch.setattr(
        bench_gather,
        "move_rows",
        lambda table, offset, pitch, buffer, tokens, *rest, **named: right(
            table, offset, pitch, buffer, tokens.flip(0), *rest, **named
        ),
    )
    with pytest.raises(AssertionError, match="gather kernel: other rows"):
        bench_gather.compare("cpu", ((64, 64),), 100)


def test_the_gather_table_says_that_there_was_no_gpu(capsys):
    assert (
        bench.main([*TINY[:-1], "--peers", "none", "--methods", "full", "--no-split", "-p", "none"])
        == 0
    )
    out = capsys.readouterr().out
    data = json.loads(out.strip().splitlines()[-1])
    assert (
        "| gather kernel" in out
        and "| copy per row" in out
        and bench_gather.CPU_NOTE in out
        and data["link"] in out
    )
    assert {r["way"] for r in data["gather"]} == set(bench_gather.WAYS)
    _, out, data = run(capsys, "--peers", "none", "--methods", "full", "--no-split", "-p", "none")
    assert "gather kernel" not in out and data["gather"] == []
