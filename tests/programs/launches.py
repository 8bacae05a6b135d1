"""Count what one decode step launches, on a machine without a GPU.

The step runs on CPU tensors with the Triton launchers, whose kernels are replaced by counters that
do nothing: a step reads nothing back, so it takes the same path whatever they leave. torch's
operators are counted where they would launch a kernel. Of the plain form of a step (step="plain")
the two compiled halves of a layer are not run by op: what Inductor makes of them was read from its
code for a GPU.

    python -m tests.programs.launches         the table of docs/PERFORMANCE.md
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import pkgutil
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine.load.planner
import kernels
from engine import (
    EMLLM,
    LLM,
    ClusterKV,
    Delta,
    DoubleSparsity,
    Full,
    Kascade,
    LessIsMore,
    OmniKV,
    OmniKVHeads,
    OmniKVTopP,
    OracleTopK,
    PQCache,
    Quest,
    SparQ,
)
from engine.forward.decode import Decoder
from engine.model.tensors import random_stream
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from tests.builders import VOCAB, hybrid_config, session_config, tiny_llm
from tests.fake_gpu import READS

# Llama-3-8B's layers, the bucket of 128K tokens, filters of the published setting
SHAPE = dict(layers=32, heads=32, kv_heads=8, hidden=512, head_dim=16, max_positions=131072)
FILTERS = dict(filter_layers=(2, 8, 18), tokens=2048, dense_below=0)
STEPS = {
    "Full": (Full(), "device"),
    "OmniKV w1": (OmniKV(wait_layers=1, **FILTERS), "device"),
    "OmniKV w0": (OmniKV(wait_layers=0, **FILTERS), "device"),
    "w1, host tier": (OmniKV(wait_layers=1, **FILTERS), "host"),
}
# layers, experts and experts of a token, of three mixtures; hidden sizes do not change a count
_GPT_OSS = dict(
    architectures=["GptOssForCausalLM"],
    num_local_experts=32,
    num_experts_per_tok=4,
    rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096),
)
_QWEN3_MOE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
_GEMMA4 = dict(
    architectures=["Gemma4ForCausalLM"],
    hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
    global_head_dim=32,
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=32,
)
_SMALL = dict(heads=16, kv_heads=4, hidden=64, head_dim=16, max_positions=131072)
MIXTURES = {
    "gpt-oss-20b": dict(layers=24, intermediate_size=32, **_SMALL, **_GPT_OSS),
    "qwen3-30b-a3b": dict(layers=48, **_SMALL, **_QWEN3_MOE),
    "gemma-4-26b-a4b": dict(layers=30, **_SMALL, **_GEMMA4),
}
# as many layers as Qwen3.5-0.8B, of which every fourth attends, and as Granite 4 Small, of which 4
# of 40 do
RECURRENT = {
    "qwen3.5": hybrid_config(24, max_positions=131072),
    "granite 4": hybrid_config(
        40,
        "granite",
        max_positions=131072,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    ),
}
# methods that choose, over the same layers; heads of 16 have a channel as a label
_K = dict(tokens=64)
_FILTERED = dict(filter_layers=(2, 8, 18), dense_below=0, **_K)
CHOOSING = {
    "omnikv": lambda: OmniKV(**_FILTERED),
    "omnikv_heads": lambda: OmniKVHeads(**_FILTERED),
    "omnikv_top_p": lambda: OmniKVTopP(**{**_FILTERED, "least": 16}),
    "quest": lambda: Quest(**_K),
    "kascade": lambda: Kascade(anchors=(0, 2, 8, 18), **_K),
    "less_is_more": lambda: LessIsMore(**_K),
    "delta": lambda: Delta(**_K),
    "oracle_topk": lambda: OracleTopK(granularity="kv_head", **_K),
    "sparq": lambda: SparQ(**_K),
    # lists of query heads are attended to by torch's operator, which a count of 0 crashes
    "double_sparsity": lambda: DoubleSparsity(channels=(((1,),) * 8,) * 32, gqa_reduce="max", **_K),
    "em_llm": lambda: EMLLM(sink=4, local=64, most=16, **_K),
    "clusterkv": lambda: ClusterKV(segment=80, per=20, **_K),
    "pqcache": lambda: PQCache(train=64, **_K, sink=4),
}
# before: 2 fused kernels and 1 product; after: 3 fused and 3 products, two of them with split-K
BEFORE, AFTER = 3, 8
VIEWS = (
    "view", "reshape", "expand", "permute", "transpose", "slice", "select", "unsqueeze", "squeeze",
    "split", "detach", "alias", "as_strided", "unbind", "chunk", "empty", "empty_strided",
    "empty_like", "new_empty", "lift_fresh", "t", "_unsafe_view", "unflatten", "narrow",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """by: {operator or kernel: how often it was launched}; reads: {operator: how often the host
    waited for it}.
    """

    def __init__(self):
        super().__init__()
        self.by, self.reads, self.off = Counter(), Counter(), 0

    def __enter__(self):
        real = torch.Tensor.tolist

        def tolist(tensor):
            self.reads["tolist"] += 1
            return real(tensor)

        self._patch = mock.patch.object(torch.Tensor, "tolist", tolist)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised):
        self._patch.stop()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in READS:
            self.reads[name] += 1
        if not self.off and name not in VIEWS:
            self.by[name] += 1
        return func(*args, **(kwargs or {}))

    def piece(self, function, launches, name):
        """A half of a layer as one entry of `launches` kernels."""

        def run(*arguments):
            self.by[name] += launches
            self.off += 1
            try:
                return function(*arguments)
            finally:
                self.off -= 1

        return run

    def _zeros(self, real):
        """What makes tensors that a kernel is to write: it does not, and operators read them."""

        def made(*arguments, **named):
            self.off += 1
            try:
                return real(*arguments, **named).zero_()
            finally:
                self.off -= 1

        return made

    @contextlib.contextmanager
    def kernels_counted(self):
        """Triton kernels that do nothing but count."""
        with contextlib.ExitStack() as stack:
            for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
                real = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, self._zeros(real)))
            always = mock.patch(
                "kernels.launch.dispatch.choose_for", lambda backend, device: "triton"
            )
            stack.enter_context(always)
            for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
                found = importlib.import_module(module.name)
                for name in [name for name in vars(found) if name.endswith("_kernel")]:
                    stack.enter_context(mock.patch.object(found, name, _Counted(self.by, name)))
            yield


class _Counted:
    def __init__(self, by, name):
        self.by, self.name = by, name

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            self.by[self.name] += 1

        return launch


def launches(method, offload, step="fused", weights="auto") -> Counter:
    """{operator or kernel: launches} of one decode step of a session of 300 tokens in a bank for
    128K.
    """
    real, record = engine.load.planner.full_placement, Launches()

    def by_layer(*arguments, **named):  # as on a GPU
        placement = real(*arguments, **named)
        return None if placement is None else dataclasses.replace(placement, by_layer=True)

    by_group = mock.patch.object(engine.load.planner, "full_placement", by_layer)
    with by_group, record.kernels_counted():
        llm = _model(session_config(**SHAPE), method, offload, step, weights)
        _step(llm, record, plain=step == "plain")
    return record.by


def mixture_launches(name, chosen="device", weights="auto") -> Launches:
    """The launches and the waits of one decode step of one of MIXTURES, whose experts `chosen`
    ("device" or "host") chooses; both halves of a layer are torch's operators, uncompiled.
    """
    record, config = Launches(), session_config(**MIXTURES[name])
    with record.kernels_counted():
        llm = _model(config, Full(), "device", "plain", weights)
        for layer in llm.model.layers:
            assert layer.mixture.stacks is not None
            if chosen == "host":
                layer.mixture.choose_on_host()
        _step(llm, record, plain=False)
    return record


def recurrent_launches(name) -> Launches:
    """The launches and the waits of one decode step of one of RECURRENT; both halves of a layer are
    torch's operators, uncompiled.
    """
    record = Launches()
    with record.kernels_counted():
        _step(_model(RECURRENT[name], Full(), "device", "plain", "auto"), record, plain=False)
    return record


def choosing_launches(name, layers=32) -> Launches:
    """The launches and the waits of one decode step of one of CHOOSING, whose index is up to date
    but for the newest token.
    """
    record = Launches()
    shape = {**SHAPE, "layers": layers, "hidden": 64, "max_positions": 4096}
    with record.kernels_counted():
        llm = _model(session_config(**shape), CHOOSING[name](), "device", "fused", "auto")
        _step(llm, record, plain=False, before=1)
    return record


def _model(config, method, offload, step, weights) -> LLM:
    llm = LLM.from_stream(
        config,
        random_stream,
        method=method,
        device="cpu",
        chunk=64,
        max_context=config.max_positions,
        offload=offload,
        backend="triton",
        dtype="bfloat16",
        ram_budget=1 << 40,
        step=step,
        weights=weights,
    )
    llm.load()
    return llm


def _step(llm, record, plain, before=0) -> None:
    """Run one decode step of a session of 300 tokens under `record`, after so many others."""
    with llm.session() as session:
        session.adopt([1] * 300)
        decoder = session.runner._own_step._decoder
        if isinstance(session.method, Full):
            decoder = session.runner._dense_step._decoder
        assert isinstance(decoder, Decoder)
        if plain:
            halves = decoder.halves
            halves._pre_attention = record.piece(halves._pre_attention, BEFORE, "before")
            halves._post_attention = record.piece(halves._post_attention, AFTER, "after")
        for number in range(before + 1):
            session.bank.before_step(301 + number)
            session.runner.feed(1, 301 + number)
            record.by.clear(), record.reads.clear()
            with torch.no_grad(), record:
                decoder.step(session.runner.token, session.runner.length, session.bank)


def token_launches(ahead: bool) -> Counter:
    """{operator: launches} between two steps of a greedy answer, the copy to the host included."""
    record = Launches()
    with tiny_llm(Full(), session_config(layers=1)).session() as session:
        session.prefill([1, 2, 3])
        with torch.no_grad(), record:
            if ahead:
                session.runner.feed_argmax(session.last_logits, 4)
            else:
                token, _, _ = Sampler(SamplingParams(), VOCAB).sample(session.last_logits)
                record.by["tolist"] += 1  # a copy and a wait
                session.runner.feed(token, 4)
    del record.by["to"]  # of float32 to float32: nothing
    return record.by


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.launches",
        description="Count what one decode step launches, on a machine without a GPU.",
    )
    parser.parse_args()
    for name, (method, offload) in STEPS.items():
        for step in ("plain", "fused"):
            found = launches(method, offload, step)
            parts = ", ".join(f"{k} {n}" for k, n in found.most_common())
            print(f"{name}, {step}: {found.total()}  {parts}")
    for name in MIXTURES:
        for chosen in ("host", "device"):
            record = mixture_launches(name, chosen)
            parts = ", ".join(f"{k} {n}" for k, n in record.by.most_common(12))
            waits = record.reads.total()
            print(f"{name}, chosen on the {chosen}: {record.by.total()}, {waits} waits  {parts}")
    for name in RECURRENT:
        record = recurrent_launches(name)
        parts = ", ".join(f"{k} {n}" for k, n in record.by.most_common(12))
        print(f"{name}: {record.by.total()}, {record.reads.total()} waits  {parts}")
    for name in CHOOSING:
        record = choosing_launches(name)
        parts = ", ".join(f"{k} {n}" for k, n in record.by.most_common(12))
        print(f"{name}: {record.by.total()}, {record.reads.total()} waits  {parts}")
    for ahead in (False, True):
        found = token_launches(ahead)
        parts = ", ".join(f"{k} {n}" for k, n in found.most_common())
        way = "issued ahead" if ahead else "read first"
        print(f"between two steps, {way}: {found.total()}  {parts}")


if __name__ == "__main__":
    main()
