"""The decode step compiled and uncompiled, and what it allocates.

Stops: a graph that is compiled again as the context grows, compiled pieces that compute something
else, a step whose temporary memory grows with the context (which ends a long conversation
half-way).
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tools.common.synthetic_bank import synthesize

CONFIG = tiny_config(layers=6, heads=4, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, sharpness=2.0)
SPARSE = dict(filter_layers=(1, 3), tokens=32, tail=64, dense_below=0)
METHODS = {
    "full": Full(),
    "last": OmniKV(**SPARSE),
    "raw": OmniKV(scores="raw", sink=2, **SPARSE),
    "uniform": OmniKV(selector="uniform", **SPARSE),
    "exponential": OmniKV(selector="exponential", **SPARSE),
}


def greedy(session, logits, count):
    """`count` greedy tokens and the logits after each."""
    tokens, seen = [], []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = session.decode(tokens[-1])
        seen.append(logits)
    return tokens, torch.stack(seen)


def compilations():
    """How many graphs torch.compile has made, and how often it gave one up for another."""
    counters = torch._dynamo.utils.counters
    return (
        counters["stats"]["unique_graphs"],
        sum(counters["recompiles"].values()),
        sum(counters["graph_break"].values()),
    )


@pytest.fixture(scope="module")
def compiled():
    """One LLM with compiled pieces, for all methods; the counters start at zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=1024, backend="auto", compile=True)


@pytest.mark.parametrize("name", ["last", "full", "uniform"])
def test_compiled_steps_are_the_eager_ones_and_compile_once(compiled, name):
    eager = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=1024, backend="auto", compile=False)
    with compiled.session(METHODS[name]) as one, eager.session(METHODS[name]) as other:
        first, expected = one.prefill(random_ids(300)), other.prefill(random_ids(300))
        one.decode(3), one.decode(4)  # warm-up
        one.truncate(300)
        before = compilations()
        tokens, logits = greedy(one, first, 200)
        assert compilations() == before and before[0] >= 2 and before[2] == 0
        others, expected = greedy(other, expected, 200)
        assert tokens == others
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        if name != "full":
            assert one.stats.sparse_steps == 202 and all(
                len(chosen) == 32 for chosen in one.selections.values()
            )


def test_two_graphs_serve_all_layers_all_methods_and_all_lengths(compiled):
    """`before` and `after`, whatever ran in this file so far: 6 layers, 3 methods, 200 lengths."""
    with compiled.session(METHODS["exponential"]) as session:
        greedy(session, session.prefill(random_ids(40)), 3)
    assert compilations()[:2] == (2, 0)


class Allocations(TorchDispatchMode):
    """Most bytes of a storage that each operation creates; views and writes into existing storages
    do not count.
    """

    def __init__(self):
        super().__init__()
        self.by_op = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {storage(t)[0] for t in tensors_in((args, kwargs))}
        for t in tensors_in(out):
            where, size = storage(t)
            if where not in given and size:
                self.by_op[str(func)] = max(self.by_op[str(func)], size)
        return out


def storage(t):
    """(where it is, its bytes); oneDNN's packed weights keep theirs to themselves."""
    if t.is_mkldnn:
        return id(t), t.numel() * t.element_size()
    return t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()


def tensors_in(found):
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return (
        [t for item in found for t in tensors_in(item)] if isinstance(found, (list, tuple)) else []
    )


# The CPU paths work in blocks of at most 8192 rows (kernels/attention/cpu.py): from there on
# nothing may be larger at a larger length. multiples of 64: the same place in a tail block
DEPTHS = (8256, 32832)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_no_tensor_that_grows_with_the_context_is_created_in_a_step(name, dtype):
    """At 4 times the context no operation of a step creates a larger tensor than it did before, nor
    does another appear.
    """
    config = tiny_config(layers=6, heads=4, kv_heads=2, max_positions=DEPTHS[-1] + 64)
    llm = tiny_llm(METHODS[name], config, WEIGHTS, backend="auto", compile=False, dtype=dtype)
    made = []
    for length in DEPTHS:
        with llm.session() as session:
            synthesize(session, length)
            # whatever a first step wants (the window of unread rows)
            session.decode(1)
            session.truncate(length)
            with Allocations() as record:
                session.decode(2)
            assert session.stats.sparse_steps == (0 if name == "full" else 2)
        made.append(record.by_op)
    assert made[0] == made[1]
    assert max(made[0].values()) <= 8192 * CONFIG.num_heads * 4


def test_the_check_sees_growth():
    """The plain references do create tensors that grow: were they on the fast path, the test above
    would fail.
    """
    llm = tiny_llm(METHODS["last"], CONFIG, WEIGHTS, max_context=1024)
    made = []
    for length in (320, 640):
        with llm.session() as session:
            session.prefill(random_ids(length))
            with Allocations() as record:
                session.decode(2)
        made.append(max(record.by_op.values()))
    assert made[1] > made[0]
