"""A decode step of a mixture asks the host for nothing, so that it is captured as any other.

Kernels are counters that do nothing (tests/programs/launches.py): a step that reads nothing back
takes the same path whatever they leave.

Stops: a choice that is read on the host, a capture that a read would break, launches of a mixture
that grow unnoticed.
"""

from dataclasses import replace

import pytest
import torch

import engine.forward.graphs as graphs
from engine import LLM, Full
from engine.base.device import capture_stream
from engine.base.errors import DeviceFailed, SettingError
from engine.load.options import Options
from engine.model.llama import post_attention
from engine.model.tensors import random_stream
from tests.builders import random_ids, session_config, tiny_llm
from tests.fake_gpu import FakeGPU
from tests.programs.launches import MIXTURES, Launches, mixture_launches

pytest.importorskip("triton", reason="triton is not installed here")
SMALL = dict(MIXTURES["qwen3-30b-a3b"], layers=2, num_experts=8)
GEMMA = "gemma-4-26b-a4b"


@pytest.mark.parametrize("name", MIXTURES)
def test_a_step_waits_for_nothing_and_launches_four_kernels_a_layer(name):
    layers = MIXTURES[name]["layers"]
    host, device = (mixture_launches(name, chosen) for chosen in ("host", "device"))
    assert device.reads == {} and host.reads == {"tolist": layers}
    ours = ("product_kernel", "choose_kernel", "open_kernel", "sum_kernel")
    assert {kernel: device.by[kernel] for kernel in ours} == dict.fromkeys(ours, layers)
    # uncompiled, torch's operators around them included
    most = {"gpt-oss-20b": 903, "qwen3-30b-a3b": 2227, GEMMA: 3245}
    assert device.by.total() <= most[name] < host.by.total() - 8 * layers


def test_a_chunk_waits_once_a_layer():
    """For the rows that each expert has; it was once for each expert that any row chose."""
    config, record = session_config(**SMALL), Launches()
    mixture = tiny_llm(Full(), config, max_context=64).load().model.layers[0].mixture
    with record:
        mixture(torch.randn(1, 100, config.hidden_size))
    assert record.reads == {"tolist": 1}


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_of_few_bits_launch_what_floats_launch(weights):
    found = mixture_launches("gpt-oss-20b", weights=weights)
    assert found.reads == {}
    for kernel in ("choose_kernel", "open_words_kernel", "sum_words_kernel"):
        assert found.by[kernel] == 24


@pytest.mark.parametrize("changes", [SMALL, dict(MIXTURES[GEMMA], layers=6, num_experts=8)])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_step_is_captured_unless_the_host_chooses(on_host, changes, monkeypatch):
    """On a GPU that refuses a read while it captures."""
    gpu, record = FakeGPU(monkeypatch, cards=1), Launches()
    capture_stream.cache_clear(), graphs._anchor.cache_clear()
    with record.kernels_counted():
        llm = tiny_llm(Full(), session_config(**changes), backend="triton", max_context=512)
        llm.loaded = replace(llm.load(), graphs=True)
        if on_host:
            for layer in llm.model.layers:
                layer.mixture.choose_on_host()
        with llm.session() as session:
            session.prefill(random_ids(40))
            for token in (3, 4):
                session.decode(token)
            assert session.runner._dense_step.captures != on_host
            if on_host:  # what a capture would have met
                session.runner._dense_step.captures = True
                with pytest.raises(DeviceFailed, match="not permitted when stream is capturing"):
                    session.decode(5)
    assert len(gpu.of("replay")) == (0 if on_host else 2)
    capture_stream.cache_clear(), graphs._anchor.cache_clear()


@pytest.mark.parametrize("weights", ["float", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_layers_half_is_one_graph_for_all_layers(name, weights):
    """With the mixture as one operator; a graph for one token and one for any number of them. The
    output projection's product of few bits tells more than 16 rows from fewer. Gemma 4's layers
    that see everything have wider heads, and so graphs of their own.
    """
    layers = dict(layers=6 if name == GEMMA else 3)
    config, record = session_config(**MIXTURES[name] | layers), Launches()
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    with record.kernels_counted(), torch.no_grad():
        given = dict(backend="triton", device="cpu", max_context=512, dtype="bfloat16")
        llm = LLM.from_stream(config, random_stream, weights=weights, **given)
        half = torch.compile(post_attention, fullgraph=True, dynamic=False, backend="aot_eager")
        half = graphs._of_any_width(half)
        for width in (1, 5, 17):
            x = torch.randn(1, width, config.hidden_size).bfloat16()
            for number, layer in enumerate(llm.load().model.layers):
                heads = config.num_heads, config.heads_of(number)[1]
                attended = torch.randn(1, width, *heads).bfloat16()
                assert half(layer, x, attended, 1e-5).shape == x.shape
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (
        (2 if weights == "float" else 3) * (2 if name == GEMMA else 1)
    )
    torch._dynamo.reset()


def test_a_mixture_is_compiled_where_the_device_chooses():
    config, gpu = session_config(**SMALL), torch.device("cuda", 0)
    cpu = torch.device("cpu")
    for backend, device, compiled in (
        ("auto", gpu, True),
        ("reference", gpu, False),
        ("auto", cpu, False),
    ):
        assert Options(backend=backend).compiles(config, device) == compiled
    with pytest.raises(SettingError, match="here the host chooses the experts of a mixture"):
        Options(compile=True).compiles(config, cpu)
    assert Options(compile=True, backend="triton").compiles(config, cpu)
