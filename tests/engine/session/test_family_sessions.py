"""Sessions over small random models of some families: prompts of every residue, what is sparse,
both tiers, going back, copies, files, batches and plans.

The families here have more beside Llama than a block: a router of their own, rows of two widths,
layers that share rows. Stops: a row written twice or by a layer that only reads it, a ring of the
wrong width, a plan that counts what nobody allocates.
"""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from engine.base.errors import SettingError
from engine.methods.registry import methods
from engine.model.config.config import ModelConfig
from tools.families.models import ids_of, make

pytest.importorskip("transformers")
NAMES = ["minimax-m2"]
# every residue modulo 8, whole chunks and blocks and one beside them
LENGTHS = [1, 2, 3, 10, 36, 61, 62, 63, 64, 65, 127, 128, 129, 195, 333, 511, 513, 700]
STEPS = 20
CONTEXT = 1024
every_family = pytest.mark.parametrize("name", NAMES)


@functools.cache
def made(name):
    """(folder, transformers' logits [vocab] of every position of ids_of) of a variant."""
    folder = Path(tempfile.mkdtemp())
    theirs = make(folder, name)
    with torch.inference_mode():
        ids = torch.tensor([ids_of(max(LENGTHS) + STEPS)])
        plain = theirs(ids).logits[0]
        theirs.set_experts_implementation("eager")  # the other knows no float64
        return folder, plain, theirs.double()(ids).logits[0]


def llm_of(name, method=None, **settings):
    given = dict(device="cpu", chunk=128, max_context=CONTEXT) | settings
    return LLM(made(name)[0], method=method or Full(), **given)


def omni(name, **settings):
    """OmniKV whose filter is the first layer that sees everything."""
    seeing = ModelConfig.from_folder(made(name)[0]).seeing_layers
    return OmniKV(filter_layers=seeing[:1], **dict(tail=64, dense_below=0) | settings)


def apart(found, wanted):
    """The largest difference of logits, of the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def run(session, ids, steps):
    """Logits [1 + len(steps), vocab] after a prompt and after each step."""
    return torch.stack([session.prefill(ids), *(session.decode(token) for token in steps)])


@every_family
def test_prompts_of_every_residue_and_20_steps_are_transformers(name):
    _, plain, wanted = made(name)
    llm, ids = llm_of(name), ids_of(max(LENGTHS) + STEPS)
    for n in LENGTHS:
        with llm.session() as session:
            rows = run(session, ids[:n], ids[n : n + STEPS])
        for at, row in enumerate(rows, n - 1):
            # in float64, as near as transformers' own float32 where that is further
            assert apart(row, wanted[at]) < max(2e-5, 2 * apart(plain[at], wanted[at])), (n, at)


@every_family
def test_omnikv_is_sparse_and_with_all_tokens_is_full(name):
    ids = ids_of(700 + STEPS)
    _, _, wanted = made(name)
    found = {}
    for tokens in (CONTEXT, 40):
        for tier in ("device", "host"):
            llm = llm_of(name, omni(name, tokens=tokens), offload=tier)
            with llm.session() as session:
                found[tokens, tier] = run(session, ids[:700], ids[700:])
                assert session.stats.sparse_steps == STEPS
    for tier in ("device", "host"):
        rows = found[CONTEXT, tier]
        assert all(apart(row, wanted[699 + i]) < 1e-4 for i, row in enumerate(rows))
    assert apart(found[40, "device"][1:], wanted[700:720]) > 1e-3  # it read fewer rows
    assert apart(found[40, "device"], found[40, "host"]) < 2e-5


@every_family
def test_both_tiers_are_one_bit_for_bit_on_the_reference(name):
    ids, found = ids_of(333), []
    for tier in ("device", "host"):
        llm = llm_of(name, omni(name, tokens=40), offload=tier, backend="reference")
        with llm.session() as session:
            found.append(run(session, ids[:325], ids[325:]))
            assert session.stats.sparse_steps == 8
    assert torch.equal(*found)


@every_family
@pytest.mark.parametrize("tier", ["device", "host"])
def test_going_back_copies_and_files_end_where_a_fresh_session_does(name, tier, tmp_path):
    ids = ids_of(400)
    llm = llm_of(name, omni(name, tokens=40), offload=tier)
    with llm.session() as session, llm.session() as fresh:
        wanted = run(fresh, ids[:300], ids[300:310])
        run(session, ids[:300], [*ids[300:304], 5, 6, 7])
        session.truncate(304)
        with session.fork() as branch:
            assert apart(branch.decode(ids[304]), wanted[5]) < 1e-5
        session.save(tmp_path / "session")
        assert apart(session.decode(ids[304]), wanted[5]) < 1e-5
        again, _ = llm.restore(tmp_path / "session")
        with again:
            rows = [again.decode(token) for token in ids[304:310]]
            assert apart(torch.stack(rows), wanted[5:]) < 1e-5
            assert again.stats.sparse_steps >= 6
        session.truncate(200)
        assert apart(session.prefill(ids[200:300]), wanted[0]) < 1e-5


@every_family
def test_sessions_of_a_batch_say_what_each_says_alone(name):
    llm, alone = llm_of(name, omni(name, tokens=40)), []
    prompts, steps = [ids_of(n, seed=n) for n in (30, 170, 301)], ids_of(10, seed=3)
    for prompt in prompts:
        with llm.session() as session:
            alone.append(run(session, prompt, steps))
    with llm.batch(slots=3) as batch:
        sessions = [batch.session() for _ in prompts]
        for session, prompt, rows in zip(sessions, prompts, alone):
            assert apart(session.prefill(prompt), rows[0]) < 1e-5
        for number, token in enumerate(steps, 1):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, rows in zip(sessions, alone):
                assert apart(found[session], rows[number]) < 1e-4


@every_family
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_plan_counts_what_is_allocated(name, tier):
    llm = llm_of(name, omni(name, tokens=40), offload=tier)
    with llm.session() as session:
        session.prefill(ids_of(300))
        assert session.bank.nbytes == walked(session.bank)
        items = {key: size for key, size, _ in llm.plan().items}
        if tier == "device":
            rows = items["context bank"] + items.get("sliding windows", 0)
            assert session.bank.nbytes == rows
        assert session.query_ring.nbytes == items["query ring"]
        assert session.runner.model.nbytes == items["weights"]


def walked(bank):
    """Bytes of every tensor that a bank holds on the device; shared memory counts once."""
    seen, found, waiting = set(), {}, [bank]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            memory = one.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif isinstance(one, BlockTable):
            waiting.append(one.addresses)  # its blocks are host memory
        elif isinstance(one, HostPool):
            continue
        elif type(one).__module__.startswith(("engine.bank.", "kernels.tier.")):
            waiting += vars(one).values()
    return sum(found.values())


@every_family
def test_every_method_runs_or_refuses_in_one_line(name):
    llm, ran = llm_of(name), set()
    first = llm.config.seeing_layers[0]
    for kind_name, kind in methods().items():
        settings = {"filter_layers": (first,)} if kind_name.startswith("omnikv") else {}
        try:
            with llm.session(kind(**settings)) as session:
                session.prefill(ids_of(150))
                assert torch.isfinite(session.decode(3)).all()
                ran.add(kind_name)
        except SettingError as error:
            assert "\n" not in str(error)
    assert {"full", "omnikv", "quest"} <= ran
