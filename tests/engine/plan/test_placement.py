"""What lives where: a row of the host tier byte for byte, the plan of an 8B on machines of several
sizes, one pool for many.

Stops: layers of a group that lie apart (a packed fetch would be many), a plan that offloads more
than it must, device memory that grows faster than the layers that read everything, a pool that is
made twice.
"""

from dataclasses import replace

import pytest
import torch

from engine import LLM, OmniKV
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import Allocator, ordinary
from engine.base.errors import OutOfHostMemory, OutOfMemoryPlan
from engine.load.memory import make_plan
from engine.plan import free_memory
from engine.plan.free_memory import HEADROOM
from engine.plan.placement import full_placement, part_bytes
from tests.builders import random_ids, session_config, tiny_llm
from tools.bench.shapes import shape_config

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
BLOCK = 64 * part_bytes(session_config(), 4) * len(METHOD.plan(session_config()).sparse_layers)
LLAMA_8B = shape_config("llama-3-8b")
PUBLISHED = OmniKV(filter_layers=(2, 8, 18), tokens=2048, wait_layers=1)
GB = 10**9


# ---------------------------------------------------------------- a row


@pytest.mark.parametrize("wait, head_dim", [(0, 16), (1, 16), (1, 10)])
def test_a_tokens_row_holds_all_layers_of_its_group_side_by_side(wait, head_dim):
    """K then V of every layer of the group, ascending, each part padded to 64 bytes: one contiguous
    row per token.
    """
    method = OmniKV(filter_layers=(1, 4), wait_layers=wait, tokens=40, tail=64, dense_below=0)
    config = session_config(head_dim=head_dim)
    settings = dict(config=config, max_context=512, chunk=50, backend="reference")
    host, device = (
        tiny_llm(method, offload=where, **settings).session() for where in ("host", "device")
    )
    for session in (host, device):
        session.prefill(random_ids(200))
    groups = [group.layers for group in method.plan(config).groups]
    assert len({len(group) for group in groups}) == 2  # groups of different sizes
    part, width = part_bytes(config, 4), config.kv_bytes(4)
    assert part % 64 == 0 and (part > width) == (head_dim == 10)
    for token in (0, 63, 64, 130, 199):
        block, at = host.bank.table.blocks[token // 64].bytes, 0
        for group in groups:
            row = block[at + token % 64 * len(group) * part :][: len(group) * part]
            for i, layer in enumerate(group):
                k, v = device.bank.kv(layer)
                expected = torch.cat((k[0, :, token].flatten(), v[0, :, token].flatten()))
                assert torch.equal(row[i * part : i * part + width].view(torch.float32), expected)
            at += 64 * len(group) * part
        assert at == block.numel()


def test_rows_of_an_8b_are_16_32_and_48_kb():
    needs = PUBLISHED.needs(PUBLISHED.plan(LLAMA_8B), LLAMA_8B, 131072, 2)
    placement = full_placement(needs, 131072, 4096)
    assert [len(group) * part_bytes(LLAMA_8B, 2) for group in placement.offload_groups] == [
        16384,
        32768,
        49152,
    ]
    assert placement.slots == 4 * 2048 and placement.ring == 256 + 128


# ---------------------------------------------------------------- plans of other machines


@pytest.fixture
def plan(monkeypatch):
    """plan(device bytes, host bytes, tokens): the 8B's plan on a GPU of such a machine; nothing of
    it needs to be here.
    """

    def make(device, host, tokens, method=PUBLISHED, **settings):
        monkeypatch.setattr(
            free_memory,
            "available_bytes",
            lambda where: (device if where.type == "cuda" else host, "free"),
        )
        return make_plan(
            "8B",
            LLAMA_8B,
            method,
            method.plan(LLAMA_8B),
            torch.bfloat16,
            torch.device("cuda"),
            tokens,
            **{"backend": "triton", **settings},
        )

    return make


def test_device_memory_of_a_million_tokens_is_34_kib_per_token(plan):
    """The eight layers that read everything are 32 KiB; slots, maps, tail, streaming and scratch
    share the rest.
    """
    found = plan(141 * GB, 128 * GB, 1048576, offload="host")
    assert found.fits and (found.total - found.bytes_of("weights")) / 1048576 <= 34 * 1024
    assert (
        found.bytes_of("context bank") == 8 * 4096 * 1048576
        and found.host_bytes == 24 * 4096 * 1048576
    )


@pytest.mark.parametrize("tokens, budget", [(450000, 40 * GB), (131072, 24 * GB)])
def test_long_contexts_in_small_gpus(plan, tokens, budget):
    found = plan(141 * GB, 128 * GB, tokens, budget=budget)
    assert (
        found.fits
        and found.total <= budget
        and found.placement is not None
        and found.max_context == tokens
    )
    if budget == 40 * GB:
        with pytest.raises(OutOfMemoryPlan):
            plan(141 * GB, 128 * GB, tokens, budget=budget, offload="device").require_fit()


def test_auto_offloads_the_fewest_groups_that_fit(plan):
    """From everything on the device to everything offloaded as the GPU shrinks; groups stay whole,
    the largest go first.
    """
    seen = []
    for size in range(16, 81, 2):
        found = plan(size * GB, 500 * GB, 131072)
        groups = () if found.placement is None else found.placement.offload_groups
        if not found.fits:
            assert len(groups) == 3  # not before all are gone
            continue
        assert found.total <= size * GB * HEADROOM
        seen.append([len(group) for group in groups])
    assert seen == sorted(seen, key=sum, reverse=True) and seen[0] == [4, 8, 12] and seen[-1] == []
    assert [x for i, x in enumerate(seen) if x not in seen[:i]] == [[4, 8, 12], [8, 12], [12], []]


def test_a_context_that_fits_loses_nothing(plan):
    found = plan(80 * GB, 500 * GB, 131072)
    alone = plan(80 * GB, 500 * GB, 131072, offload="device")
    assert (
        found.placement is None
        and found.total == alone.total
        and found.where == "everything on the device"
        and found.resident == 1
    )


def test_too_little_host_memory_is_said_before_anything_is_allocated(plan):
    found = plan(40 * GB, 20 * GB, 450000)
    assert not found.fits
    with pytest.raises(
        OutOfMemoryPlan,
        match=r"450000 tokens needs 44\.\d+ GB of host memory .*remedies: max_context=\d+",
    ):
        found.require_fit()
    assert plan(40 * GB, 20 * GB, found.largest_context).fits


def test_the_chunk_hides_the_past_or_the_plan_says_that_it_does_not(plan):
    """4096 tokens against a row's 4096 bytes at 650 TFLOP/s and 50 GB/s; the line about placement
    is one line.
    """
    found = plan(40 * GB, 500 * GB, 450000)
    assert found.chunk == 4096 and "do not hide" not in found.where and "\n" not in found.where
    assert (
        "layers 4-7, 10-17, 20-31 in host memory" in found.where
        and "of 500.00 GB free host memory" in found.where
    )
    assert (
        "chunks of 1024 tokens do not hide the transfers of a prefill"
        in plan(40 * GB, 500 * GB, 450000, chunk=1024).where
    )
    assert plan(80 * GB, 500 * GB, 131072).chunk == 2048


def test_a_plan_with_a_host_tier_says_what_a_wait_layer_would_hide(plan):
    """Placement never changes the layers; the plan only says what they would cost or save."""
    without = replace(PUBLISHED, wait_layers=0)
    hint = "wait_layers=1 hides more of each load"
    assert hint in plan(40 * GB, 500 * GB, 450000, method=without).where
    assert hint not in plan(40 * GB, 500 * GB, 450000).where
    assert hint not in plan(80 * GB, 500 * GB, 131072, method=without).where  # nothing is loaded


# ---------------------------------------------------------------- one pool


def counting():
    """(allocator, sizes asked for)."""
    asked = []
    return Allocator("test", lambda size: asked.append(size) or ordinary(size)), asked


def test_slabs_are_allocated_once_and_serve_later_sessions():
    allocator, asked = counting()
    llm = tiny_llm(
        METHOD,
        offload="host",
        host_pool=HostPool(slab_bytes=3 * BLOCK, allocators=[allocator]),
        max_context=512,
        backend="reference",
    )
    for _ in range(3):
        with llm.session() as session:
            session.prefill(random_ids(300))
        assert llm.load().host_pool.in_use == 0 and len(asked) == 2
    llm.load().host_pool.close()
    assert llm.load().host_pool.reserved == 0


def test_llms_over_the_same_weights_share_their_pool_and_others_only_by_argument():
    settings = dict(offload="host", max_context=512, backend="reference")
    first, second = tiny_llm(METHOD, **settings), tiny_llm(METHOD, **settings)
    assert (
        first.load().host_pool is not second.load().host_pool
        and LLM.sharing(first, offload="host").load().host_pool is first.load().host_pool
    )
    assert tiny_llm(METHOD, host_pool=first.host_pool, **settings).host_pool is first.host_pool


def test_two_models_at_once_over_one_pool_and_the_second_exhausts_it():
    """Rows of different sizes; the one that finds no memory says so, the other answers as ever."""
    settings = dict(offload="host", max_context=512, chunk=50, backend="reference")
    other = dict(settings, config=session_config(layers=6, head_dim=32))
    pool = HostPool(limit=6 * BLOCK, slab_bytes=BLOCK)
    alone = tiny_llm(METHOD, **settings).session()
    shared, greedy = (tiny_llm(METHOD, host_pool=pool, **s).session() for s in (settings, other))
    assert torch.equal(shared.prefill(random_ids(200)), alone.prefill(random_ids(200)))
    with pytest.raises(OutOfHostMemory, match="the pool's limit is"):
        greedy.prefill(random_ids(400))
    assert 0 < len(greedy) < 400 and greedy.decode(1) is not None
    assert all(torch.equal(shared.decode(5), alone.decode(5)) for _ in range(20))
    greedy.close()
    shared.close()
    assert pool.in_use == 0


def test_little_host_memory_does_not_refuse_what_the_device_holds(plan):
    """A group that goes back frees host memory, so the search goes on where that is too small."""
    assert plan(80 * GB, 1 * GB, 65536).fits
    whole = plan(80 * GB, 100 * GB, 65536)
    assert plan(80 * GB, 1 * GB, 65536).placement == whole.placement is None
    some = plan(40 * GB, 100 * GB, 262144)
    assert some.placement is not None and some.fits
    needed = int(some.host_bytes / HEADROOM) + 1
    assert plan(40 * GB, needed, 262144).placement == some.placement
    assert not plan(40 * GB, needed - 10**8, 262144).fits
