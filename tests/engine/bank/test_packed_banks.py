"""Banks in fewer bits: every method over them gives what it gives over a bank of floats whose rows
were rounded as packed rows are, bit for bit on the reference launchers, on both tiers.

Stops: a reader that misses the scale, a writer that rounds otherwise, rows of another width in host
memory, in a file or in a fork, a plan that counts other bytes than are allocated.
"""

import pytest
import torch

import engine.bank.chunk_bank
import engine.bank.device
import engine.bank.row_layout
import engine.bank.window_ring
import engine.load.memory
import engine.saved.model_key
import kernels.layer.store
from engine import LLM, Exact, Full, OmniKV
from engine.base.errors import SavedFileError, SettingError
from engine.load.options import Options
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.evict.by_head import compensated
from engine.methods.select.wave import retroinfer
from engine.saved.rows import piece_shape, read_piece, write_piece
from kernels.rows.forms import DTYPES, FORMS, as_bytes, row_widths, unpack, unpack_keys
from tests.builders import POCKET, random_ids, session_config, tiny_config, tiny_llm
from tests.engine.methods.method_table import TABLE, every, fitted

WRITERS = (
    engine.bank.chunk_bank,
    engine.bank.device,
    engine.bank.row_layout,
    engine.bank.window_ring,
    kernels.layer.store,
    compensated,
    retroinfer,
)
HEAD_DIM = 32  # the least that every form divides
SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, tail=64, dense_below=0)
SHARES = {"int8": 40 / 128, "int4": 48 / 256, "fp8": 40 / 128}
METHODS = every(lambda row: row.sparse)
# one of each kind of method: rows of every form are read by the same few readers, and a method that
# evicts copies them as bytes
FEW = {"omnikv", "quest", "infllm", "h2o", "snapkv", "window", "pod_untrained", "tidaldecode"}
FEW |= {"sparq", "pqcache", "kascade"}


def is_run(bank, name, row):
    """Whether a method runs over a bank: each does over int8."""
    once = name.endswith("-0") or not row.evicts
    return once if bank == "int8" else name.endswith("-0") and row.name in FEW


SETTINGS = [
    pytest.param(row, method, bank, id=f"{bank}-{name}")
    for bank in ("int8", "int4", "fp8")
    for name, row, method in METHODS
    if is_run(bank, name, row)
]


@pytest.fixture(params=["int8", "int4", "fp8"])
def packed(request):
    """The banks in fewer bits."""
    return request.param


@pytest.fixture
def simulated(monkeypatch, packed):
    """Every bank of floats rounds what is written as a packed bank does."""
    form = FORMS[DTYPES[packed]]

    def rounded(x, bank, backend="auto"):
        return unpack(form.values.pack(x, backend), bank.dtype)

    def rounded_keys(k, bank, backend="auto"):
        """Packed rows hold K transformed."""
        return unpack_keys(form.keys.pack(k, backend), bank.dtype)

    for module in WRITERS:
        monkeypatch.setattr(module, "stored", rounded)
        monkeypatch.setattr(module, "stored_keys", rounded_keys)


def llm_of(method, bank, offload="device", **settings):
    settings = dict(max_context=512, backend="reference", dtype="float32") | settings
    config = settings.pop("config", session_config(head_dim=HEAD_DIM))
    method = fitted(method, config.num_layers, config.num_kv_heads)
    return tiny_llm(method, config, bank=bank, offload=offload, **settings)


def course(llm, row=None, method=None, length=301, made=7):
    """Logits of a prompt, an answer, a truncate, a fork and a second turn."""
    seen = []
    with llm.session(method) as session:
        seen.append(session.prefill(random_ids(length)))
        seen += [session.decode(token) for token in random_ids(made, seed=1)]
        session.truncate(length + 3)
        seen += [session.decode(token) for token in random_ids(3, seed=2)]
        with session.fork() as other:
            seen += [other.decode(token) for token in random_ids(2, seed=3)]
        if row is None or not row.one_prompt:
            seen.append(session.prefill(random_ids(70, seed=4)))
            seen += [session.decode(token) for token in random_ids(2, seed=5)]
        held = session.bank.nbytes + session.bank.host_nbytes
    return torch.stack(seen), held


@pytest.mark.parametrize(("row", "method", "packed"), SETTINGS, indirect=["packed"])
def test_every_method_reads_packed_rows(simulated, monkeypatch, packed, row, method):
    offload = "host" if sum(map(ord, row.name)) % 2 and not row.evicts else row.offload
    want, _ = course(llm_of(method, "model", offload), row)
    monkeypatch.undo()
    llm = llm_of(method, packed, offload)
    found, _ = course(llm, row)
    # InfiniGen's columns come from a decomposition: a last bit, which hangs on where memory lies on
    # an EPYC Turin, turns a choice of a step; what prompts say is the same
    same = want == found if row.name == "infinigen" else None
    assert torch.equal(want, found) if same is None else same[0].all(), same
    with llm_of(method, "model", offload).session() as plain:
        assert not torch.equal(plain.prefill(random_ids(301)), found[0]), "nothing was rounded"


@pytest.mark.parametrize("method", [Full(), SPARSE, Exact(SPARSE)], ids=["full", "omnikv", "exact"])
def test_both_tiers_give_the_same_bits(method, packed):
    device, few = course(llm_of(method, packed))
    host, _ = course(llm_of(method, packed, "host"))
    assert torch.equal(device, host)
    # of float32 rows of 32 elements: (32 + 8) / 128, or (28 + 20) / 256
    assert few < SHARES[packed] * 1.2 * course(llm_of(method, "model"))[1]


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("method", [Full(), SPARSE, BrutalOffload(layers=2)], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("packed", "dtype"),
    [("int8", "float32"), ("int8", "bfloat16"), ("int4", "float32"), ("fp8", "float32")],
)
def test_fast_launchers_give_what_the_reference_gives(method, offload, packed, dtype):
    """Nearer than rounding the rows brings them to a bank of floats: a last bit of k may turn one
    value of a row by a step, so that kernel tolerances do not hold behind a rounded bank. In
    bfloat16 the model's own roundings are the larger part.
    """
    config = session_config(head_dim=16 if packed == "int8" else HEAD_DIM)
    settings = dict(offload=offload, dtype=dtype, config=config)
    found = {
        (bank, backend): course(llm_of(method, bank, backend=backend, **settings))[0]
        for bank in (packed, "model")
        for backend in ("auto", "reference")
    }

    def apart(one, other):
        return float((found[one] - found[other]).abs().mean())

    rounding = apart((packed, "reference"), ("model", "reference"))
    control = apart(("model", "auto"), ("model", "reference"))
    assert apart((packed, "auto"), (packed, "reference")) < max(0.7 * rounding, 1.5 * control)


def test_omnikv_was_sparse_and_its_selections_are_those_of_the_rounded_rows(
    simulated, monkeypatch, packed
):
    chosen = []
    for bank in ("model", packed):
        with llm_of(SPARSE, bank).session() as session:
            session.prefill(random_ids(400))
            session.decode(3)
            chosen.append(session.selections)
            assert session.runtime.rows_read(401)[2] < 200
        monkeypatch.undo()
    assert chosen[0].keys() == chosen[1].keys() == {1, 4}
    assert all(torch.equal(chosen[0][layer], chosen[1][layer]) for layer in chosen[0])


def test_omnikv_prefill_on_both_tiers(simulated, monkeypatch, packed):
    method = OmniKV(filter_layers=(1, 4), tokens=24, tail=64, dense_below=0, prefill_ratio=2)
    want, _ = course(llm_of(method, "model"), length=400)
    monkeypatch.undo()
    for offload in ("device", "host"):
        assert torch.equal(course(llm_of(method, packed, offload), length=400)[0], want)


def test_windows_are_packed_too(simulated, monkeypatch, packed, tmp_path):
    config = tiny_config(
        4,
        head_dim=HEAD_DIM,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=40,
    )
    settings = dict(config=config, max_context=512, backend="reference")
    want, _ = course(tiny_llm(Full(), **settings))
    monkeypatch.undo()
    llm = tiny_llm(Full(), bank=packed, **settings)
    # but for the fork's two steps: a fork of the simulated bank rounds its window once more
    kept = [step for step in range(len(want)) if step not in (11, 12)]
    assert config.windows and torch.allclose(course(llm)[0][kept], want[kept], atol=1e-5)
    with llm.session() as session:
        session.prefill(random_ids(300))
        session.save(tmp_path / "one")
        with session.fork() as other:
            forked = other.decode(5)
        kept = session.decode(5)
        assert torch.equal(forked, kept)
    session, _ = llm.restore(tmp_path / "one")
    with session:
        assert torch.equal(session.decode(5), kept)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_the_plan_is_the_allocation(monkeypatch, offload, packed):
    llm = llm_of(SPARSE, packed, offload, backend="auto")
    plan = llm.plan()
    with llm.session() as session:
        session.prefill(random_ids(500))
        held = session.bank.nbytes
        tier = ("working sets", "streaming") if offload == "host" else ()
        assert held == sum(map(plan.bytes_of, ("context bank", *tier)))
        assert session.scratch_bytes == plan.bytes_of("decode scratch")
    plain = llm_of(SPARSE, "model", offload, backend="auto").plan()
    assert ("values in 4 bits, keys in 6" in str(plan)) == (packed == "int4")
    for why in ("", "no C++ compiler"):
        monkeypatch.setattr(engine.load.memory, "missing", lambda why=why: why)
        other = llm_of(SPARSE, packed, offload, backend="auto").plan()
        said = "keys in 6, slower to read than floats" in str(other)
        assert said == (packed == "int4" and bool(why))
    share = plan.bytes_of("context bank") / plain.bytes_of("context bank")
    assert share == pytest.approx(SHARES[packed])
    assert [sum(row_widths(d, torch.uint8)) / d / 4 for d in (64, 128)] == [0.34375, 0.328125]


def test_a_saved_session_comes_back_and_other_rows_are_refused(tmp_path, packed):
    llm = llm_of(SPARSE, packed)
    with llm.session() as session:
        session.prefill(random_ids(300))
        session.save(tmp_path / "one")
        want = session.decode(5)
    for offload in ("device", "host"):
        session, _ = llm.restore(tmp_path / "one", offload=offload)
        with session:
            assert torch.equal(session.decode(5), want)
    for other in {"model", "int8", "int4", "fp8"} - {packed}:
        with pytest.raises(SavedFileError, match=packed) as found:
            llm_of(SPARSE, other).restore(tmp_path / "one")
        assert "\n" not in str(found.value)


def test_a_file_holds_no_zeros_and_a_bank_puts_them_back(packed):
    """Before 2026-11-24 a row of 8-bit values had none: files of then and of now are the same."""
    llm = llm_of(Full(), packed)
    dtype, dim = DTYPES[packed], HEAD_DIM
    k, v = torch.randn(2, 40, llm.config.num_kv_heads, dim)
    packs = FORMS[dtype].keys.pack(k), FORMS[dtype].values.pack(v)
    kept = [dim + 4] * 2 if packed != "int4" else row_widths(dim, dtype)
    piece = torch.cat([as_bytes(x)[..., :n].flatten(1) for x, n in zip(packs, kept)], 1)
    with llm.session() as session:
        bank = session.bank
        shape = piece_shape(bank, 40)
        rows = piece.expand(shape[0], -1, -1).reshape(shape).view(dtype)
        write_piece(bank, rows, 0)
        for layer in range(bank.num_layers):
            for held, made in zip(bank.kv(layer, 40), packs):
                assert torch.equal(as_bytes(held[0]), as_bytes(made).transpose(0, 1))
        assert torch.equal(as_bytes(read_piece(bank, 0, 40)), as_bytes(rows))


@pytest.mark.parametrize(
    ("bank", "old", "new"), [("int8", "kv-1", "kv-2"), ("int4", "kv-2", "kv-3")]
)
def test_rows_of_the_former_form_are_refused(tmp_path, monkeypatch, bank, old, new):
    """Before K was transformed, a file of the same sizes said kv-1; int4 rows of kv-2 held keys in
    5 bits and values that were not transformed.
    """
    llm = llm_of(Full(), bank)
    with llm.session() as session, monkeypatch.context() as patch:
        session.prefill(random_ids(20))
        patch.setitem(engine.saved.model_key.BANK_FORMATS, bank, f"{old}, {bank}")
        session.save(tmp_path / "old")
    match = f"bank format.*{old}, {bank}.*{new}, {bank}"
    with pytest.raises(SavedFileError, match=match) as found:
        llm.restore(tmp_path / "old")
    assert "\n" not in str(found.value)


def test_check_and_a_method_switch_run_on_it(packed):
    with llm_of(SPARSE, packed).session() as session:
        session.prefill(random_ids(300))
        for token in random_ids(6, seed=1):
            session.decode(token)
        before = [t.clone() for t in session.bank.kv(2, 306)]
        assert session.check(4).steps
        after = session.bank.kv(2, 306)
        assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(before, after))
        session.set_method(Full())
        assert torch.isfinite(session.decode(1)).all()


@pytest.mark.parametrize("bank", ["fp4", "fp8_e5m2", "int4:64", "INT8", 8, None])
def test_another_word_is_refused(bank):
    with pytest.raises(SettingError, match="bank: found"):
        llm_of(SPARSE, bank)


@pytest.mark.parametrize(
    ("bank", "head_dim", "multiple"), [("int8", 12, 8), ("int4", 48, 32), ("int4", 288, 32)]
)
def test_heads_that_cannot_be_packed_are_refused_before_anything_is_read(bank, head_dim, multiple):
    with pytest.raises(
        SettingError, match=f"bank: .*heads of {head_dim} .*multiples of {multiple}"
    ):
        tiny_llm(Full(), session_config(head_dim=head_dim), bank=bank)


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False)])
def test_eight_bit_floats_are_refused_where_a_gpu_has_none(monkeypatch, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    options = Options(bank="fp8")
    if not refused:
        options.require_bank(torch.device("cuda", 0))
        return
    with pytest.raises(SettingError, match="bank: found 'fp8'.*8.0 .*use bank='int8'") as found:
        options.require_bank(torch.device("cuda", 0))
    assert "\n" not in str(found.value)


def test_the_shipped_model_says_the_same():
    text = "The key of Anna is 4711. The key of Ben is 9313. " * 40 + "The key of Anna is"
    said = []
    for bank in ("model", "int8", "int4"):
        llm = LLM(str(POCKET), bank=bank, device="cpu", threads=1, method=Full())
        said.append(_greedy(llm, text))
    floats, int8, int4 = said
    assert llm.tokenizer.decode(floats[:3]) == "4711." and floats == int8
    # the answer and "The"; the word behind it is nearer to another than 4 bits tell apart: 0.16
    assert floats[:4] == int4[:4]


def _greedy(llm, text):
    with llm.session() as session:
        logits, said = session.prefill(llm.encode(text)), []
        for _ in range(5):
            said.append(int(logits.argmax()))
            logits = session.decode(said[-1])
    return said


def test_the_table_is_whole():
    assert {row.values[0].name for row in SETTINGS} >= {row.name for row in TABLE if row.sparse}
