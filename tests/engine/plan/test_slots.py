"""What a plan says of several sessions: what they share, what each costs, how many fit.

Stops: a server that starts and dies of memory when its last slot is taken, a plan that leaves out
what a slot costs beside its bank.
"""

import pytest

from engine import OmniKV
from engine.base.errors import OutOfMemoryPlan
from engine.load.batch_plan import plan_slots
from engine.plan.free_memory import HEADROOM
from engine.serve.cli import main
from tests.builders import tiny_llm

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)


def planned(llm, slots, context=2048):
    return plan_slots(
        lambda length: llm.plan(max_context=length), context, slots, llm.config.vocab_size
    )


@pytest.mark.parametrize("offload", ["device", "host"])
def test_each_slot_costs_what_a_session_holds(offload):
    llm = tiny_llm(SPARSE, offload=offload, max_context=2048)
    found = planned(llm, 3)
    with llm.batch(3) as batch:
        sessions = [batch.session() for _ in range(3)]
        held = sum(
            s.bank.nbytes + s.query_ring.nbytes + s.scratch_bytes + s.runtime.nbytes
            for s in sessions
        )
    host = 3 * (llm.plan().host_bytes if offload == "host" else 0)
    logits = 3 * 2 * 4 * llm.config.vocab_size
    assert 3 * found.each == held + host + logits
    assert found.total == found.shared + 3 * found.each
    assert found.shared + found.each - logits // 3 == llm.plan().total


def test_how_many_fit_and_how_a_refusal_reads():
    free = planned(tiny_llm(SPARSE, max_context=2048), 1)
    llm = tiny_llm(SPARSE, max_context=2048, ram_budget=free.shared + 5 * free.each + 1000)
    found = planned(llm, 5)
    assert found.most == 5 and found.fitting[0] == (2048, 5)
    assert [length for length, _ in found.fitting] == [2048, 1024]
    assert found.fitting[1][1] >= 8 and found.free == pytest.approx(
        llm.plan().free * HEADROOM, abs=1
    )
    found.require_fit()
    with pytest.raises(OutOfMemoryPlan, match="6 sessions of 2048 .* --slots 5, a smaller --ctx"):
        planned(llm, 6).require_fit()
    assert "slots     6 of 2048 tokens: " in str(planned(llm, 6))
    assert found.to_dict()["fitting"][2048] == 5


def test_the_server_says_what_its_slots_need(capsys):
    assert main(["--plan", "--ctx", "2K", "--slots", "3"]) == 0
    said = capsys.readouterr().out
    assert "context bank" in said and "slots     3 of 2048 tokens: " in said
    few = ["--plan", "--ctx", "2K", "--slots", "200", "--ram-budget", "0.1"]
    assert main(few) == OutOfMemoryPlan.exit_code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit: 200 sessions of 2048 tokens, ") and "--slots " in last
    assert main(["--plan", "--ctx", "2K", "--method", "infllm"]) == 2
    assert "allow that with --pause 0" in capsys.readouterr().err
    assert main(["--plan", "--ctx", "2K", "--method", "infllm", "--pause", "0"]) == 0
    assert main(["--plan", "--pause", "-1"]) == 2
    assert "--pause: at least 0" in capsys.readouterr().err
