"""Methods that choose by an index, and InfLLM: a layer's step in one call of C++ is the step by a
call each, index by index.

Stops: a token that is learnt twice or not at all, after going back too, the rows of another bank, a
tail or a choice of the step before, a mean that misses the newest row, a block that forms too late.
"""

import pytest
import torch

from engine.methods.full import Full
from engine.methods.select.index.base import IndexRuntime
from engine.methods.select.index.clusterkv import ClusterKV
from engine.methods.select.index.double_sparsity import DoubleSparsity
from engine.methods.select.index.pqcache import PQCache
from engine.methods.select.index.sparq import SparQ
from engine.methods.select.infllm import InfLLM
from engine.methods.select.taught.a2ats import A2ATSRuntime as A2ATSRuntime
from engine.methods.select.wave.retroinfer import RetroInferRuntime as RetroInferRuntime
from kernels.index.step import BoundLayer
from kernels.kept.stream import BoundStream
from kernels.native.library import missing
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_table import heavy_channels

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
CONFIG = tiny_config(layers=3, heads=8, kv_heads=2, head_dim=16)
WEIGHTS = tiny_weights(CONFIG, seed=5)
METHODS = {
    "pqcache": PQCache(tokens=24, sink=3, parts=2, bits=4, train=40, rounds=3),
    "sparq": SparQ(tokens=24, r=5),
    "sparq without a mean": SparQ(tokens=24, r=16, mean=False, gqa_reduce="max"),
    "double_sparsity": DoubleSparsity(
        tokens=24, channels=heavy_channels(3, 2), count=5, dense_layers=1
    ),
    "double_sparsity by K/V head": DoubleSparsity(
        tokens=24, channels=heavy_channels(3, 2), count=3, gqa_reduce="sum", dense_layers=0
    ),
    "clusterkv": ClusterKV(tokens=24, sink=3, segment=20, per=4, rounds=3, dense_layers=1),
    "infllm": InfLLM(block=5, init=3, local=32, topk=3, representatives=2, chunk=16),
    "infllm of one block": InfLLM(block=7, init=0, local=9, topk=1, representatives=7, chunk=9),
}

# what a layer's call does in the place of these
OWN = {"absorb", "rank", "select", "attend", "attend_selection", "completed", "tail_start"}

ACTIONS = (
    ("prefill", 90),
    ("decode", 30),
    ("truncate", 1),
    ("decode", 3),
    ("truncate", 25),
    ("decode", 4),
    ("prefill", 34),
    ("decode", 25),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_in_one_call_is_one_in_many(name, dtype, monkeypatch):
    """Prompts, steps, going back by one token and by many, a second prompt."""
    calls, ids, wide = [], random_ids(300, seed=2), dtype == "float32"
    given = dict(max_context=320, chunk=32, backend="auto", dtype=dtype)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, **given)
    for bound in (BoundLayer, BoundStream):
        monkeypatch.setattr(bound, "run", counted(bound.run, calls))
    with llm.session(METHODS[name]) as one, llm.session(METHODS[name]) as many:
        many.runtime._binds = False
        for action, count in ACTIONS:
            at = len(one)
            for session in (one, many) if action == "truncate" else ():
                session.truncate(at - count)
            for session in (one, many) if action == "prefill" else ():
                session.prefill(ids[at : at + count])
            for token in ids[at : at + count] if action == "decode" else ():
                found, expected = one.decode(token), many.decode(token)
                near = 2e-4 if wide else 0.1  # InfLLM's sums have another order
                torch.testing.assert_close(found, expected, atol=near, rtol=near)
                if wide:  # else near scores may change places
                    chosen, same = one.runtime.selections(), many.runtime.selections()
                    assert chosen and chosen.keys() == same.keys()
                    assert all(torch.equal(rows, same[i]) for i, rows in chosen.items())
        assert many.runtime._bound == {} and len(one.runtime._bound) > 1
        assert len(calls) >= 55 * len(one.runtime._bound)


def counted(run, calls):
    def called(*given):
        calls.append(given)
        return run(*given)

    return called


def test_who_learns_or_chooses_in_another_way_says_what_its_call_is():
    """`by` of a base class says what the base class does: a subclass that does otherwise and
    inherited it chose as its base does.
    """
    found = list(heirs(IndexRuntime))
    assert {"A2ATSRuntime", "RetroInferRuntime"} <= {kind.__name__ for kind in found}
    for kind in found:
        said = next(i for i, base in enumerate(kind.__mro__) if "by" in vars(base))
        before = set().union(*map(vars, kind.__mro__[:said]))
        assert kind.__mro__[said] is IndexRuntime or not before & OWN, kind.__name__


def heirs(kind):
    """All subclasses of a class, those that methods have."""
    for found in kind.__subclasses__():
        yield found
        yield from heirs(found)
