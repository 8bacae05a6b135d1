"""What generating a token reads from the device beside the token itself: nothing.

Stops: a counter that is copied from the device for every token, while the device waits.
"""

from engine import OmniKV
from engine.bank.host.tiered import TieredBank
from engine.bank.pool.host_pool import HostPool
from engine.sampling.params import SamplingParams
from engine.session.generate import generate
from tests.builders import random_ids, tiny_llm

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)


def test_no_counter_is_read_from_the_device_while_an_answer_is_written(monkeypatch):
    """Over a host tier, the working sets count on the device."""
    pool = HostPool(slab_bytes=1 << 20)
    session = tiny_llm(METHOD, offload="host", max_context=512, host_pool=pool).session()
    asked, real = [], TieredBank.counters
    monkeypatch.setattr(TieredBank, "counters", lambda bank: asked.append(1) or real(bank))
    pieces = list(generate(session, random_ids(200), SamplingParams(max_tokens=12)))
    assert asked == [] and len(pieces) == 12
    stats = pieces[-1].stats
    assert stats.sparse_steps == 12 and stats.dense_steps == 0
    assert stats.decode_seconds > 0 and stats.prefill_seconds > 0
    assert session.stats.misses > 0 and asked == [1], "the spy sees a reading"
