"""The seam of simulated banks: which rows are rounded when, the bytes they are counted at, what
quantisers are handed, and steps against the reading of many tokens at once.

Stops: a row rounded while it should be a float or twice, a prompt that reads its own rows rounded,
keys that are not turned back, probe weights of other queries, a run that was not sparse.
"""

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from engine import Full, OmniKV
from engine.base.errors import SettingError
from engine.model.rope import apply_rope
from tests.builders import POCKET, random_ids, tiny_llm
from tools.banks import quality
from tools.banks.base import Quantiser, Rounded
from tools.banks.quality import every_logits, interval, measure
from tools.banks.registry import quantiser
from tools.banks.simulated import probed, simulated

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, tail=64, dense_below=0)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(Full(), max_context=512, backend="reference", dtype="float32")


@dataclass(frozen=True)
class Seen(Quantiser):
    """Keeps what it is handed; rows become zero and cost a bit per element."""

    note: ClassVar[str] = "zeros"

    def round(self, run, memo, stage):
        memo.setdefault("runs", []).append((run, stage))
        return Rounded(run.k * 0, run.v * 0, 2 * run.k.numel())


class SeenBeforeRope(Seen):
    before_rope = True


class SeenAndProbed(Seen):
    probes = True


@dataclass(frozen=True)
class Stairs(Seen):
    """Two stages."""

    ages: ClassVar[tuple[int, ...]] = (32, 96)

    def round(self, run, memo, stage):
        memo.setdefault("runs", []).append((run, stage))
        return Rounded(run.k / 2, run.v / 2, (2 - stage) * 2 * run.k.numel())


def rows(session, layer, stop):
    k, v = session.bank.kv(layer, stop)
    return torch.cat((k[0], v[0])).clone()


def exact(llm, ids):
    """The rows of a session of floats that has read these tokens, layer 0: each depends on its own
    token only.
    """
    with llm.session(Full()) as twin:
        twin.prefill(ids)
        return rows(twin, 0, len(ids))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 151])
def test_which_rows_are_rounded_when(llm, length):
    prompt, answer = random_ids(length), random_ids(40, seed=1)
    every = exact(llm, prompt + answer)
    with llm.session(Full()) as base:
        base.prefill(prompt)
        with simulated(base, Seen(1)) as session:
            bank, elements = session.bank, 2 * 2 * 16  # K and V, heads, width
            for token in answer:
                session.decode(token)
                # rounded before the step, at the length that it began with
                done = max(0, len(session) - 1 - 32) // 32 * 32
                found, wanted = rows(session, 0, len(session)), every[:, : len(session)]
                assert not found[:, :done].any()
                torch.testing.assert_close(found[:, done:], wanted[:, done:])
                bits = (done + 16 * (len(session) - done)) * elements * llm.config.num_layers
                assert bank.held_bytes(len(session)) == -(-bits // 8)
            runs = [(run.first, run.k.shape[1]) for run, _ in bank._memos[0].get("runs", [])]
            assert [first for first, _ in runs] == [
                sum(n for _, n in runs[:i]) for i in range(len(runs))
            ]
            bank.settle(len(session))
            due = max(0, len(session) - 32) // 32 * 32
            assert not rows(session, 0, due).any() and rows(session, 0, due + 1)[:, due:].any()


def test_a_prompt_reads_its_own_rows_as_they_are_and_the_past_rounded(llm):
    """Chunks are of 64 tokens: nothing of a prompt is rounded before its last chunk is read."""
    first, more = random_ids(150), random_ids(200, seed=1)
    with llm.session(Full()) as base:
        base.prefill(first)
        with simulated(base, Seen(1)) as session:
            session.prefill(more)
            assert not rows(session, 0, 96).any()  # 150 - 32 in whole blocks
            wanted = exact(llm, session.ids)
            torch.testing.assert_close(rows(session, 0, 350)[:, 96:], wanted[:, 96:])
            session.decode(0)
            assert not rows(session, 0, 288).any() and rows(session, 0, 289)[:, 288:].any()


@pytest.mark.parametrize("name", ["kivi2", "rotatekv2", "zipcache2", "saq2", "sign"])
def test_reading_many_tokens_at_once_sees_what_steps_see(llm, name):
    ids = random_ids(220)
    with llm.session(Full()) as base:
        base.prefill(ids[:96])
        with simulated(base, quantiser(name)) as steps, simulated(base, quantiser(name)) as blocks:
            wanted = torch.stack([steps.decode(token).flatten() for token in ids[96:]])
            found = torch.cat([logits for logits in chunks(blocks, ids)])
            assert steps.bank.held_bytes(220) <= steps.bank._bits.sum() / 8
            for session in (steps, blocks):
                session.bank.settle(220)
            assert steps.bank.held_bytes(220) == blocks.bank.held_bytes(220)
    scale = wanted.std()
    with llm.session(Full()) as plain:
        plain.prefill(ids[:96])
        floats = torch.stack([plain.decode(token).flatten() for token in ids[96:]])
    # a code at a tie may fall either way: nearer by far than the rounding itself
    assert (found - wanted).abs().mean() < 1e-3 * scale
    assert (floats - wanted).abs().mean() > 3e-2 * scale


def chunks(session, ids):
    for start in range(len(session), len(ids), 32):
        yield every_logits(session, ids[start : start + 32])


@pytest.mark.parametrize("name", ["kivi16", "gear16", "mikv16"])
@pytest.mark.parametrize("method", [Full(), SPARSE], ids=["full", "omnikv"])
def test_sixteen_bits_answer_as_floats_do(llm, name, method):
    with llm.session(Full()) as base:
        base.prefill(random_ids(301))
        with base.fork() as plain, simulated(base, quantiser(name)) as session:
            for one in (plain, session):
                one.set_method(method)
            for token in random_ids(9, seed=1):
                assert torch.equal(plain.decode(token), session.decode(token))
            if method is SPARSE:
                assert session.stats.sparse_steps == session.stats.decode_steps == 9
            whole = 310 * llm.config.num_layers * llm.config.kv_bytes(2)
            assert session.bank.held_bytes(310) == whole


def test_a_sparse_method_chooses_among_rounded_rows(llm):
    """The control's rows are so poor that other tokens are chosen."""
    chosen = []
    with llm.session(Full()) as base:
        base.prefill(random_ids(301))
        for name in ("kivi16", "kivi8", "sign"):
            with simulated(base, quantiser(name)) as session:
                session.set_method(SPARSE)
                session.decode(5)
                chosen.append(session.selections[4])
                assert session.stats.sparse_steps == 1
    near, far = (float(torch.isin(chosen[0], found).float().mean()) for found in chosen[1:])
    assert near > 0.9 > far


def test_keys_before_rope_do_not_know_their_position(llm):
    """One token over and over: in layer 0 its key before rope is the same everywhere."""
    with llm.session(Full()) as base:
        base.prefill([7] * 120)
        before, after = (rows(base, 0, 120) for _ in range(2))
        with simulated(base, SeenBeforeRope(1)) as session:
            session.decode(7)
            run, _ = session.bank._memos[0]["runs"][0]
            assert run.k.shape == (2, 64, 16)
            torch.testing.assert_close(run.k, run.k[:, :1].expand_as(run.k), atol=1e-4, rtol=0.0)
            assert not torch.allclose(before[:2, :64], before[:2, :1].expand(2, 64, 16), atol=0.1)
        same = type(
            "Same",
            (SeenBeforeRope,),
            {"round": lambda self, run, memo, stage: Rounded(run.k, run.v, 0)},
        )
        with simulated(base, same(1)) as session:
            session.decode(7)
            torch.testing.assert_close(rows(session, 0, 120), after, atol=1e-5, rtol=1e-5)


def test_stages_follow_the_age_and_round_what_is_held(llm):
    with llm.session(Full()) as base:
        base.prefill(random_ids(200))
        wanted = rows(base, 0, 200)
        with simulated(base, Stairs(1)) as session:
            session.decode(0)  # at 200: older than 96 in whole blocks: 96; than 32: 160
            runs = [(s, run.first, run.k.shape[1]) for run, s in session.bank._memos[0]["runs"]]
            assert runs == [(1, 0, 96), (0, 96, 64)]
            for token in random_ids(24, seed=1):  # the last begins at 224
                session.decode(token)
            runs = [(s, run.first, run.k.shape[1]) for run, s in session.bank._memos[0]["runs"][2:]]
            assert runs == [(1, 96, 32), (0, 160, 32)]
            found = rows(session, 0, 200)
            torch.testing.assert_close(found[:, :96], wanted[:, :96] / 2)
            torch.testing.assert_close(found[:, 96:128], wanted[:, 96:128] / 4)
            torch.testing.assert_close(found[:, 128:192], wanted[:, 128:192] / 2)
            torch.testing.assert_close(found[:, 192:], wanted[:, 192:])
            bits = (128 + 2 * 64 + 16 * 33) * 2 * 2 * 16 * llm.config.num_layers
            assert session.bank.held_bytes(225) == bits // 8


def test_weights_of_probe_queries_one_by_one():
    made = torch.Generator().manual_seed(0)
    q = torch.randn(5, 4, 16, generator=made, dtype=torch.float64)
    k = torch.randn(2, 30, 16, generator=made, dtype=torch.float64)
    positions = torch.arange(22, 27)
    found, largest = probed(q, k, positions, 3, 29)
    for token in range(3, 29):
        total, seeing = 0.0, 0
        for number, position in enumerate(positions.tolist()):
            if token > position:
                continue
            seeing += 1
            for head in range(4):
                logits = [float(q[number, head] @ k[head // 2, j]) / 4 for j in range(position + 1)]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                total += weights[token] / sum(weights) / 4
        assert float(found[token - 3]) == pytest.approx(total / max(1, seeing), abs=1e-12)
    for head, channel in ((0, 3), (1, 15)):
        wanted = max(
            abs(float(q[n, g, channel])) for n in range(5) for g in (2 * head, 2 * head + 1)
        )
        assert float(largest[head, channel]) == wanted


def test_probes_are_the_newest_queries_of_the_layer(llm):
    """In layer 0 a query depends on its token and position alone."""
    ids = random_ids(150)
    with llm.session(Full()) as base:
        base.prefill(ids)
        with simulated(base, SeenAndProbed(1)) as session:
            session.decode(0)
            run, _ = session.bank._memos[0]["runs"][0]
        positions = torch.arange(86, 150)
        q = base.query_ring.read(0, positions.unsqueeze(0))[0]
        turned = apply_rope(q, *llm.rotary.at(positions))
        k = base.bank.kv(0, 150)[0][0]
        wanted, largest = probed(turned, k, positions, 0, 96)
        torch.testing.assert_close(run.attention, wanted)
        torch.testing.assert_close(run.queries, largest)


def test_what_a_simulation_cannot_do_is_refused(llm):
    with llm.session(Full()) as base:
        base.prefill(random_ids(150))
        with simulated(base, quantiser("kivi2")) as session:
            session.decode(0)
            with pytest.raises(SettingError, match="copy the session before"):
                session.truncate(90)
                session.decode(0)
        with simulated(base, quantiser("kivi2")) as session, pytest.raises(SettingError):
            session.decode(0)
            simulated(session, quantiser("kivi4"))
    packed = tiny_llm(Full(), max_context=256, bank="int8", dtype="float32")
    with packed.session(Full()) as base, pytest.raises(SettingError, match="--bank auto"):
        simulated(base, quantiser("kivi2"))


def test_an_interval_is_of_neighbours_means():
    assert interval([1.0] * 49)[1] == math.inf
    values = [0.0] * 50 + [2.0] * 50
    low, high = interval(values)
    assert (low, high) == (0.0, pytest.approx(1.0 + 1.96))


def test_the_program_measures_banks_beside_floats(tmp_path, capsys):
    """Bytes, order by bytes, the control far off, and the same figures of a bank of 16 bits."""
    path = tmp_path / "rows.json"
    command = [str(POCKET), "--bank", "int8", "kivi16", "kivi4", "sign", "--json", str(path)]
    assert quality.main([*command, "--tokens", "100", "--length", "320"]) == 0
    found = {row["bank"]: row for row in json.loads(path.read_text())}
    page = capsys.readouterr().out
    assert found["kivi16"]["kl"] < 1e-9 and found["kivi16"]["share"] == 1.0
    assert found["int8"]["share"] == 72 / 128 and not found["int8"]["simulated"]
    assert found["int8"]["kl"] < found["kivi4"]["kl"] < found["sign"]["kl"] / 20
    assert [row["tokens"] for row in found.values()] == [100] * 4
    assert (
        page.index("kivi16 (simulated)") < page.index("| int8 |") < page.index("sign (simulated)")
    )
    rows = measure(str(POCKET), ["kivi4"], SPARSE, 20, ["prose"], 800)
    assert 0 < rows[0]["selections"] <= 1 and rows[0]["method"] == "omnikv"
    assert quality.main([str(POCKET), "--bank", "kivi99"]) == 2
    assert "--bank: found 'kivi99'" in capsys.readouterr().err


def test_the_engines_own_banks_are_measured_beside_coarser_ones():
    rows = measure(
        str(POCKET), ["int8", "int8_coarse", "int4", "int4_coarse"], SPARSE, 12, ["prose"], 800
    )
    found = {row["bank"]: row for row in rows}
    assert found["int8"]["kl"] < found["int4"]["kl"] and not any(r["simulated"] for r in rows)
    for name in ("int8", "int4"):
        assert 5 * found[name]["kl"] < found[f"{name}_coarse"]["kl"]
        assert found[name]["share"] == found[f"{name}_coarse"]["share"] < 0.6
