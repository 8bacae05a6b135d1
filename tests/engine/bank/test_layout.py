"""How a bank lies in memory: head-major on a CPU, token-major where a GPU gathers rows.

Stops: a session below its crossover whose sparse layers read twice as slowly as full attention's,
rows that a change of plan loses.
"""

import pytest
import torch

from engine.bank.device import DeviceBank
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.layers import Role
from kernels.attention.cpu import token_rows
from tests.builders import tiny_config

CONFIG = tiny_config(layers=6, heads=4, kv_heads=2)
SPARSE = OmniKV(filter_layers=(1, 3), tokens=8).plan(CONFIG)
FULL = Full().plan(CONFIG)


def filled(plan, length=5, capacity=16):
    torch.manual_seed(0)
    bank = DeviceBank(CONFIG, plan, capacity, torch.float32, "cpu")
    for layer in range(CONFIG.num_layers):
        k, v = torch.randn(2, 1, length, CONFIG.num_kv_heads, CONFIG.head_dim).unbind(0)
        bank.write_chunk(layer, k, v, 0)
    return bank


@pytest.mark.parametrize("plan", [SPARSE, FULL])
def test_on_a_cpu_a_head_lies_in_one_piece_in_every_layer(plan):
    bank = filled(plan)
    for layer in range(CONFIG.num_layers):
        for rows in bank.kv(layer):
            assert rows[0, 0].is_contiguous()
    assert SPARSE.count(Role.SPARSE) > 0


def test_where_rows_are_gathered_a_token_is_one_row_and_plans_move_it(monkeypatch):
    expected = filled(FULL)
    gathers = lambda self, plan, layer: plan.gathers(layer)  # noqa: E731  as on a GPU
    monkeypatch.setattr(DeviceBank, "_wants_token_major", gathers)
    bank = filled(SPARSE)
    for plan in (SPARSE, FULL, SPARSE):
        bank.relayout(plan)
        for layer, role in enumerate(plan.roles):
            whole = token_rows(*bank.kv(layer), 0) is not None
            assert whole == (role is Role.SPARSE)
            for mine, theirs in zip(bank.kv(layer, 5), expected.kv(layer, 5), strict=True):
                assert torch.equal(mine, theirs)
    handed_over = DeviceBank(CONFIG, FULL, 16, torch.float32, "cpu", donor=bank)
    copied = DeviceBank(CONFIG, SPARSE, 16, torch.float32, "cpu")
    copied.copy_from(handed_over, 5)
    for layer in range(CONFIG.num_layers):
        for mine, theirs in zip(copied.kv(layer, 5), expected.kv(layer, 5), strict=True):
            assert torch.equal(mine, theirs)
