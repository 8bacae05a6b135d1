"""Every method is timed at the budgets that a GPU is measured with, one that fails leaves the
others their cells, and methods that choose are compared over one choice.

Stops: a bench that ends in a traceback at its default budget (it did, for OmniKV in the host tier
at any budget above 64), and methods that are not timed because a rounding moved their choice
(Quest, TidalDecode and H2O were not, in bfloat16).
"""

import json

import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.evict.shared.accumulated_scores import AccumulatingRuntime
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.registry import methods
from engine.methods.select.base import Selecting
from engine.methods.select.quest import QuestRuntime
from tools.bench import cli as bench
from tools.bench import peers
from tools.bench import suite as bench_suite
from tools.bench.floor import Rates
from tools.bench.run import Engine, Entrant, Match, Mismatch
from tools.bench.verify import verify

QUICK = ["--device", "cpu", "-t", "1", "-p", "none", "-r", "1", "-n", "1", "--seconds", "900"]
QUICK += ["--peers", "none", "--no-gather", "--no-split", "--no-append"]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    monkeypatch.setattr(bench_suite, "measure_rates", lambda *_, **__: Rates(10e9, 8e9))


def run(capsys, *arguments):
    """(exit code, {(name, n): cell of a decode step})"""
    code = bench.main([*QUICK, *arguments])
    data = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return code, {(c["name"], c["n"]): c for c in data["cells"] if c["test"] == "tg"}


def test_the_host_tier_is_timed_at_the_default_budget(capsys):
    names = "full,omnikv,omnikv-host,brutal"
    code, cells = run(capsys, "--shape", "tiny", "--methods", names, "-d", "2600,4096")
    assert code == 0 and {n for _, n in cells} == {2600, 4096}
    assert not [c["why"] for c in cells.values() if c["why"]]
    host = next(c for (name, _), c in cells.items() if name.startswith("omnikv-host"))
    assert "tokens=2048" in host["settings"] or host["bytes"]["sparse"] > 0


def test_every_method_is_timed_at_the_default_budget(capsys):
    """All named ones, in the dtype that a GPU takes; a random model has no gates or scores."""
    names = [
        name for name in methods() if name not in ("omnikv", "double_sparsity", "duo", "razor")
    ]
    shape = ["--shape", "tiny", "--dtype", "bfloat16", "-d", "3000"]
    code, cells = run(capsys, *shape, "--methods", "omnikv,omnikv-host", *names)
    assert code == 0 and len(cells) >= len(names) + 3
    assert {name: c["why"] for (name, _), c in cells.items() if c["why"]} == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_methods_that_choose_are_compared_over_one_choice(capsys, dtype):
    flags = ["--shape", "pocket", "--dtype", dtype, "--tokens", "512", "-d", "3000,8192"]
    code, cells = run(capsys, *flags, "--methods", "quest,tidaldecode,h2o,omnikv_random")
    assert {key: c["why"] for key, c in cells.items() if c["why"]} == {} and code == 0
    for c in cells.values():
        assert 0.5 < c["checked"]["selections_agree"] <= 1, c["checked"]


def contestant(name, dtype="float32", tokens=64, n=700):
    suite = bench_suite.Suite(
        bench.options(bench.parser().parse_args([*QUICK, "--shape", "tiny", "--dtype", dtype]))
    )
    llm = suite._build()
    kind = methods()[name]
    bank = {"forget": False} if issubclass(kind, Evicting) else {}  # prompts are synthetic banks
    method = kind(tokens=tokens, **bank)
    twin = bench_suite.LLM.sharing(llm, method=method, max_context=n + 200, offload="device")
    return Engine(name, twin, n)


def wrong_where_timed(monkeypatch, owner, name, change):
    """Replace a runtime's hook by one that is wrong on every path but the reference."""
    right = getattr(owner, name)

    def wrong(self, *arguments):
        found = right(self, *arguments)
        return found if self.setup.backend == "reference" else change(found)

    monkeypatch.setattr(owner, name, wrong)


def test_a_wrong_choice_is_seen(monkeypatch):
    """Forcing the timed path's choice on the reference must not hide that it is wrong."""
    choose = QuestRuntime.choose

    def wrong(self, group, *arguments):
        counts = choose(self, group, *arguments)
        pages = self.pages[group]
        pages.copy_(torch.arange(pages.shape[1]).expand_as(pages))
        return counts

    monkeypatch.setattr(QuestRuntime, "choose", wrong)
    found = contestant("quest", tokens=128)
    with pytest.raises(Mismatch, match="selection at 700 tokens"):
        verify(found)
    assert found.session.backend == "auto" and len(found.session) == 700


def test_a_wrong_eviction_is_seen(monkeypatch):
    wrong_where_timed(monkeypatch, AccumulatingRuntime, "rank", lambda scores: -scores)
    with pytest.raises(Mismatch, match="selection at 700 tokens"):
        verify(contestant("h2o", tokens=64))


@pytest.mark.parametrize("name", ["quest", "tidaldecode", "h2o"])
def test_wrong_attention_over_the_same_choice_is_seen(name, monkeypatch):
    kinds, hooks = (EvictingRuntime, AccumulatingRuntime), ("attend_step", "attend_in_one_call")
    steps = ((kind, hook) for kind in kinds for hook in hooks)
    for owner, hook in ((Selecting, "attend_selection"), *steps):
        wrong_where_timed(monkeypatch, owner, hook, lambda out: out.roll(1, -1))
    with pytest.raises(Mismatch, match="the timed path"):
        verify(contestant(name, tokens=64))


@pytest.mark.parametrize("name", ["quest", "tidaldecode", "h2o", "snapkv", "omnikv_per_layer"])
def test_a_comparison_leaves_the_session_as_it_was(name):
    found = contestant(name)
    session = found.session
    want = session.decode(3).clone()
    found.back()
    facts = verify(found)
    assert facts["largest_logit_difference"] < 1e-2 and facts["selections_agree"] > 0.9
    assert len(session) == 700 and session.backend == "auto"
    assert torch.equal(session.decode(3), want)


# ---------------------------------------------------------------- one that fails


class Broken:
    settings = "broken"

    def __init__(self, error):
        self.error = error

    def rewind(self):
        pass

    def step(self):
        raise self.error

    def close(self):
        pass


@pytest.mark.parametrize("error", [AttributeError("a"), TypeError("b"), KeyError("c")])
def test_any_exception_of_an_entrant_is_its_reason(error):
    match = Match([Entrant("a", lambda: Broken(error))], "cpu", 100)
    match.run(1, 1)
    assert match.failed["a"].startswith(f"{type(error).__name__}: ") and match.crashed == {"a"}


def test_an_interrupt_ends_the_match():
    match = Match([Entrant("a", lambda: Broken(KeyboardInterrupt()))], "cpu", 100)
    with pytest.raises(KeyboardInterrupt):
        match.run(1, 1)


def test_what_cannot_run_is_no_crash():
    match = Match([Entrant("a", lambda: Broken(SettingError("too small")))], "cpu", 100)
    match.run(1, 1)
    assert match.failed == {"a": "too small"} and not match.crashed


@pytest.mark.parametrize("where", ["engine_bytes", "fetched_bytes", "_counted"])
def test_a_fault_around_one_method_is_one_cells_reason(where, capsys, monkeypatch):
    """Before it is timed, and after its last turn."""
    right = getattr(bench_suite, where)

    def faulty(subject, *rest):
        llm = getattr(subject, "llm", subject)
        if type(llm.method).__name__ == "OmniKV":
            raise AttributeError("no such thing")
        return right(subject, *rest)

    monkeypatch.setattr(bench_suite, where, faulty)
    shape = ["--shape", "tiny", "--tokens", "32", "-d", "300,600"]
    code, cells = run(capsys, *shape, "--methods", "full,omnikv,brutal", "--wait-layers", "0")
    assert code == 1 and "ms_median" in cells["full", 600] and "ms_median" in cells["brutal", 600]
    assert cells["omnikv w0", 300]["why"].startswith("AttributeError: no such thing")


@pytest.mark.parametrize("when", ["at", "make"])
def test_a_peer_of_another_version_is_one_cells_reason(when, capsys, monkeypatch):
    class Peer:
        name, settings = "transformers", "other"

        def __init__(self, llm):
            if when == "make":
                raise TypeError("unexpected keyword argument 'dtype'")

        def bytes_at(self, n):
            return n

        def at(self, n, room):
            raise AttributeError("module has no attribute 'StaticCache'")

        def prefill(self, ids):
            raise AttributeError("module has no attribute 'StaticCache'")

        def close(self):
            pass

    monkeypatch.setattr(peers, "_Transformers", Peer)
    flags = ["--shape", "tiny", "-d", "300", "--peers", "transformers", "--methods", "full"]
    code = bench.main([*QUICK, *flags, "-p", "64"])
    data = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    cells = {(c["name"], c["test"]): c for c in data["cells"]}
    assert code == 0 and "ms_median" in cells["full", "tg"] and "ms_median" in cells["full", "pp64"]
    why = cells["transformers", "tg"]["why"]
    assert why.startswith(("TypeError: ", "AttributeError: "))
