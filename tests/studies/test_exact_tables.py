"""The figures of docs/EXACT.md: acceptance from any token, and the probabilities of three rules.

Stops: cycles that a run would not have, a probability that no sampling shows.
"""

import pytest
import torch

from engine import Exact, Full, OmniKV, SamplingParams
from engine.plan.layers import Role
from engine.sampling.sampler import Sampler
from tests.builders import random_ids, session_config, tiny_llm
from tools.studies.exact import starts
from tools.studies.exact.acceptance import cycles_of
from tools.studies.exact.coupling import accepted as expected
from tools.studies.exact.coupling import coupling, number, race, rejection
from tools.studies.exact.frozen import FrozenDrafts
from tools.studies.exact.report import acceptance_table, counted_table, survival
from tools.studies.exact.tables import Records

CONFIG = session_config(layers=4, hidden=32, vocab_size=23)
METHOD = OmniKV(filter_layers=(1,), tokens=24, tail=64, dense_below=0)
DRAWS = 1000


def model():
    return tiny_llm(Full(), CONFIG, max_context=512, backend="reference", sharpness=2.0)


@pytest.mark.parametrize("draft", [2, 4, 7])
def test_cycles_from_any_token_are_those_of_a_run(draft):
    """Accepted counts of drafts from every token give the cycles that exact mode then has."""
    llm, ids, tokens = model(), random_ids(170, 23, seed=3), 40
    with llm.session(Full()) as session:
        written = starts.answer(session, ids, tokens)
        right = starts.accepted(session, METHOD, written)
        assert session.ids == ids and session.method == Full()
    assert len(right) == tokens - 7 and 0 in right and max(right) > 0
    with llm.session(Exact(METHOD, draft=draft, lookup=False)) as session:
        session.prefill(ids)
        params = SamplingParams(max_tokens=tokens, temperature=0)
        found = [kept for _, kept in cycles_of(session, params)]
        assert session.ids[len(ids) :] == written
    cycles = starts.cycles(right, draft)
    assert len(cycles) > 5 and cycles == found[: len(cycles)]


def test_selections_of_verification_draft_too():
    llm, ids = model(), random_ids(170, 23, seed=3)
    with llm.session(Full()) as session:
        written = starts.answer(session, ids, 30)
        for roles in ((Role.FILTER,), tuple(Role)):
            right = starts.accepted(session, METHOD, written, FrozenDrafts(*roles))
            assert right[0] == 0 and 0 < sum(right) < 7 * len(right)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_rules_accept_as_often_as_they_say(top_p):
    """`race` against the sampler's own draws, `number` against sums; rejection is the bound."""
    generator = torch.Generator().manual_seed(1)
    p_logits = 2 * torch.randn(11, generator=generator)
    q_logits = p_logits + 0.7 * torch.randn(11, generator=generator)
    params = SamplingParams(temperature=0.9, top_p=top_p, seed=1)
    one, other = Sampler(params, 11), Sampler(params, 11)
    same = sum(one.sample(p_logits)[0] == other.sample(q_logits)[0] for _ in range(DRAWS)) / DRAWS
    p, q = one.probabilities(p_logits), one.probabilities(q_logits)
    error = 4 * (0.25 / DRAWS) ** 0.5
    assert abs(same - race(p, q)) < error
    drawn = []
    uniform = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
    for values in (p.double(), q.double()):
        order = values.argsort(descending=True) if top_p < 1 else torch.arange(11)
        sums = values[order].cumsum(0)
        drawn.append(order[torch.searchsorted(sums, uniform * sums[-1], right=True)])
    both = float((drawn[0] == drawn[1]).float().mean())
    assert abs(both - number(p, q, by_rank=top_p < 1)) < error
    assert number(p, q, by_rank=top_p < 1) < race(p, q) < rejection(p, q) < 1


def test_equal_distributions_are_always_accepted():
    p = torch.tensor([0.5, 0.25, 0.25])
    for rate in (rejection(p, p), number(p, p, False), number(p, p, True), race(p, p)):
        assert rate == pytest.approx(1)
    assert expected([[1.0, 0.5], [0.5, 0.5]]) == pytest.approx((1.5 + 0.75) / 2)


def test_an_answer_is_sampled_and_its_drafts_compared():
    llm, ids = model(), random_ids(170, 23, seed=3)
    with llm.session(Full()) as session:
        session.prefill(ids)
        params = SamplingParams(temperature=0.8, seed=1)
        row = coupling(session, METHOD, ids, 20, 4, "random", params)
        assert session.ids == ids
    assert all(len(cycles) == 4 and len(cycles[0]) == 4 for cycles in row.cycles.values())
    assert expected(row.cycles["rejection"]) > expected(row.cycles["number"])


def test_records_outlive_a_run(tmp_path):
    Records(tmp_path / "r.jsonl").note("a", {"x": 1})
    Records(tmp_path / "r.jsonl").note("b", {"x": 2})
    assert [row["x"] for row in Records(tmp_path / "r.jsonl").rows.values()] == [1, 2]


def test_the_report_counts_what_its_records_say():
    """Cycles of two drafts keep 2, 0 and 2 of them; no cycle of seven fits into seven tokens."""
    assert survival([7, 0, 3]) == [2 / 3] * 3 + [1 / 3] * 4
    record = {"kind": "prose", "length": 4096, "filters": "2,8", "share": 0.033}
    record |= {"choice": "first draft", "looked_up": [-1, 4, 2], "accepted": [2, 0, 0, 0, 7, 7, 7]}
    *_, row = acceptance_table([record])
    cells = [cell.strip() for cell in row.split("|")][1:-1]
    assert cells[:4] == ["prose", "4,096", "{2,8}", "3.3%"]
    assert (
        cells[4] == f"{4 / 7:.2f}"
        and cells[11:15] == ["1.3", "2.0", "2.0", "-"]
        and cells[-1] == "3.0 x 2"
    )


def test_what_a_gpu_would_read_follows_acceptance():
    """By hand: 256K tokens of the 8B shape in bfloat16, one draft of which half is right."""
    (head, _, none), (_, _, half) = (
        list(counted_table("llama-3-8b", [262144], 0.0667, [rate] + [0.0] * 6)) for rate in (0, 0.5)
    )
    row, layers, kept = 2 * 8 * 128 * 2, 32, 17485 + 256  # of a sparse layer: k and the tail
    weights = 2 * (8030261248 - 128256 * 4096)
    full = weights + layers * 262144 * row
    draft = weights + (5 * 262144 + 27 * kept) * row
    assert "exact" in head and none.endswith("| 0 | 1.00x |")
    expected = 1.5 * full / (full + draft)
    assert expected > 1 and half.endswith(
        f"| {full / 1e9:.1f} | {full / draft:.2f}x | 1 | {expected:.2f}x |"
    )
