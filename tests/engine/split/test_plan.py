"""The plan of several devices: to each device what is allocated there, within 2%; uneven cards, a
host tier per device; and one line for what cannot be.
"""

import json
from types import SimpleNamespace

import pytest

from engine import LLM, Full, OmniKV
from engine.base.errors import OutOfMemoryPlan, SettingError
from engine.chat.cli import main
from engine.cli.introduce import introduce
from engine.load.options import Options
from engine.load.planner import Planner
from engine.plan.free_memory import HEADROOM
from tests.builders import POCKET, tiny_config
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.ownership import tensors_of
from tests.engine.split.test_sessions import METHODS, several
from tests.fake_gpu import FakeGPU

CLOSE = 0.02  # the bound


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


def held(*values):
    """Bytes of all memory that objects hold, each once."""
    found = {}
    for tensor in tensors_of(values):
        memory = tensor.untyped_storage()
        found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("split", [(3, 4), (1, 3)])
def test_each_device_holds_what_its_plan_says(tmp_path, folder, tied, offload, split):
    place = model_folder(tmp_path / "tied", tie_word_embeddings=True) if tied else folder
    method = METHODS["omnikv"]
    llm = several(place, method=method, split=split, offload=offload, backend="reference")
    plans, model = llm.plan().by_device, llm.model
    assert llm.plan().total == sum(plan.total for plan in plans)
    with llm.session() as session:
        session.prefill(ids_of(511))
        session.decode(5)  # the session is full: every host block is taken
        for number, (plan, part) in enumerate(zip(plans, model.parts, strict=True)):
            tables = [model.embed] if number == 0 else [model.norm, model.lm_head]
            bank, items = session.bank.parts[number], dict((n, s) for n, s, _ in plan.items)
            runtime = session.runner.runtime.by_part[number]
            found = {
                "weights": held(part.layers, tables),
                "query ring": held(session.query_ring.parts[number]),
                "decode scratch": held(runtime.setup.scratch),
                "selection": runtime.nbytes,
                "context bank": held(getattr(bank, "_resident", bank)),
            }
            assert found["weights"] == part.nbytes
            if bank.tiered:
                found["host tier"] = bank.host_nbytes
                on_device = bank.nbytes - found["context bank"]
                planned = items["working sets"] + items["streaming"]
                assert on_device == pytest.approx(planned, rel=CLOSE)
            for name, size in found.items():
                assert size == pytest.approx(items[name], rel=CLOSE), (number, name)
            all_found = sum(found.values())
            assert all_found == pytest.approx(sum(items[name] for name in found), rel=CLOSE)


def cards(monkeypatch, *gigabytes):
    """GPUs with so many free gigabytes."""
    fake = FakeGPU(monkeypatch, len(gigabytes))
    fake.memory = [(size << 30, size << 30) for size in gigabytes]
    return fake


def planned(context=131072, method=None, **options):
    """The plan of an 8B model in bfloat16."""
    sizes = dict(layers=32, heads=32, kv_heads=8, hidden=4096, head_dim=128)
    more = dict(intermediate_size=14336, vocab_size=128256, torch_dtype="bfloat16")
    config = tiny_config(**sizes, max_positions=1 << 20, **more)
    method = method or OmniKV(filter_layers=(2, 8, 18), tokens=2048, dense_below=0)
    asked = dict(dict(devices=(0, 1), method=method, max_context=context), **options)
    planner = Planner("8b", config, Options.of(asked))
    return planner, planner.plan()


def test_uneven_cards_get_layers_by_their_memory(monkeypatch):
    cards(monkeypatch, 48, 16)
    planner, plan = planned(method=Full())
    assert [str(device) for device in planner.devices] == ["cuda:0", "cuda:1"]
    assert plan.fits and planner.cut.starts[1] in (24, 25)
    full = [part.total / part.free for part in plan.by_device]
    assert max(full) < HEADROOM and abs(full[0] - full[1]) < 0.1
    # OmniKV's groups are cut where the bytes say
    assert planned()[0].cut.starts[1] in (24, 25)


def test_equal_cards_get_equal_parts(monkeypatch):
    cards(monkeypatch, 24, 24, 24, 24)
    sizes = []
    for method in (Full(), None):
        planner, plan = planned(method=method, devices=(0, 1, 2, 3))
        sizes.append(planner.cut.starts)
        full = [part.total for part in plan.by_device]
        assert plan.fits and max(full) < 1.15 * min(full)
    assert sizes[0] == sizes[1]


def test_a_host_tier_per_device(monkeypatch):
    cards(monkeypatch, 40, 9)
    planner, plan = planned(context=65536, split=(18, 14))
    assert planner.cut.starts == (0, 18, 32)
    first, second = plan.by_device
    assert plan.fits and second.placement is not None
    assert second.host_bytes > first.host_bytes and second.total <= second.free * HEADROOM
    found = planner.placement(planner.method, planner.layers, 65536)
    assert found.parts == (first.placement, second.placement)
    assert "device 1  cuda:1: layers 18-31 and the head" in str(plan)
    assert "in host memory" in plan.where


def test_a_device_that_is_too_small_is_named_with_its_numbers(monkeypatch):
    cards(monkeypatch, 80, 4)
    line = r"device 1 \(cuda:1\) needs [0-9.]+ GB for layers 16 .* \(weights_offload='all'\)"
    _, plan = planned(method=Full(), split=(1, 1), weights_offload="off")
    with pytest.raises(OutOfMemoryPlan, match=line):
        plan.require_fit()
    _, plan = planned(method=Full())  # by memory: what fits goes there
    assert plan.by_device[1].total < plan.by_device[0].total


REFUSED = [
    (dict(devices=["cpu", "tpu"]), "devices: found 'tpu', expected 'cpu' or 'cuda:N'"),
    (dict(devices=["cpu"]), "devices: found 1, expected 2 to 16 names"),
    (dict(devices=["cpu", "auto"]), "devices: found 'auto'"),
    (dict(devices=["cpu", "cuda:0"]), "devices: found 'cuda:0', but this torch"),
    (dict(devices=["cpu"] * 8), "devices: found 8, expected at most 7 for full over 7 layers"),
    (dict(devices=["cpu"] * 2, device="cpu"), "device: found 'cpu' beside devices cpu, cpu"),
    (dict(devices=["cpu"] * 2, split=[1, 2, 3]), r"split: found 3 numbers \(1:2:3\), expected 2"),
    (dict(devices=["cpu"] * 2, split=[0, 2]), "split: found 0"),
    (dict(split=[1, 2]), "split: found without devices"),
    (dict(devices=["cpu"] * 2, imagined_gpu=1 << 30), "imagined_gpu: found 1073741824 beside"),
]


@pytest.mark.parametrize("settings, message", REFUSED, ids=range(len(REFUSED)))
def test_bad_input_is_one_line(folder, settings, message):
    with pytest.raises(SettingError, match=message) as raised:
        LLM(folder, load=False, method=Full(), **settings)
    assert "\n" not in str(raised.value)


def test_the_command_line_prints_the_placement_before_loading(capsys):
    assert main(["--devices", "cpu,cpu", "--split", "1:3", "--plan", "--ctx", "4096"]) == 0
    out = capsys.readouterr().out
    assert "device 0  cpu: layers 0-" in out and "and the head" in out and "fits: " in out
    assert main(["--devices", "cpu,cpu", "--plan", "--json", "--ctx", "4096"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]
    assert [one["device"] for one in found] == ["cpu", "cpu"] and all(one["fits"] for one in found)
    assert found[0]["layers"][1] + 1 == found[1]["layers"][0]


def test_programs_say_what_lies_where_before_they_load():
    said = []
    llm = LLM(POCKET, load=False, devices=["cpu", "cpu"], max_context=1024)
    introduce(llm.planner, SimpleNamespace(note=said.append))
    assert llm.loaded is None and [line[:8] for line in said if "layers" in line][-2:] == [
        "device 0",
        "device 1",
    ]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--devices", "cpu,tpu"], "--devices: found 'tpu'"),
        (["--devices", "cpu,cpu", "--split", "1:x"], "--split: found '1:x'"),
        (["--devices", "cpu,cpu", "--split", "1"], "--split: found 1 numbers (1), expected 2"),
        (["--devices", "cpu,cpu", "--ranks", "2"], "--devices: found beside --ranks"),
        (
            ["--devices", "cpu,cpu", "--method", "zigzagkv"],
            "method: found zigzagkv over several devices",
        ),
    ],
)
def test_wrong_flags_end_with_2_and_one_line(capsys, flags, message):
    try:
        code = main([*flags, "--plan"])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err.strip()
    assert code == 2 and message in error and "Traceback" not in error


def test_a_plan_that_does_not_fit_names_the_device(capsys):
    assert main(["--devices", "cpu,cpu", "--ram-budget", "8MB", "--plan", "--ctx", "4096"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: device 0 (cpu): " in out
