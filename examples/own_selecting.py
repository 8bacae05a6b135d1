"""Run `python -m tools.compare --import examples/own_selecting.py --methods blockmean@30` from the
repository's root: a selecting method of your own. Every K/V head reads the blocks with the mean key
nearest to its queries, and the newest block. For one sequence; everything stays on the device.
"""

from dataclasses import dataclass

import torch

from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.plan.layers import single_layer_groups


@dataclass(frozen=True)
class BlockMean(Budgeted):
    block: int = 16

    def plan(self, config):
        return single_layer_groups(config.num_layers, range(2, config.num_layers))

    def budget(self, length):  # whole blocks, the newest included
        return max(2, super().budget(length) // self.block) * self.block

    def buffers(self, plan, config, capacity, batch=1):
        layers, heads = len(plan.groups), config.num_kv_heads
        most = self.budget(capacity) // self.block - 1
        return {
            "means": Buffer((layers, heads, capacity // self.block, config.head_dim)),
            "blocks": Buffer((layers, heads, most), torch.int32),
        }

    def runtime(self, setup):
        return BlockMeanRuntime(self, setup)


class BlockMeanRuntime(Selecting):
    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.known = [0] * len(self.plan.groups)  # blocks with a mean

    def truncate(self, length):
        self.known = [min(known, length // self.method.block) for known in self.known]

    def begin_prompt(self, start, stop, more=False):
        self.truncate(start)

    def tail_start(self, step):  # the newest block
        return (step.visible - 1) // self.method.block * self.method.block

    def tokens_read(self, n):
        return min(n, self.k - (-n % self.method.block))

    def select(self, layer, q, step):
        group, size, tail = self.plan.group_of[layer], self.method.block, self.tail_start(step)
        k, means = step.bank.kv(layer)[0][0], self.means[group]  # [heads, T or blocks, D]
        known, stop, read = self.known[group], int(tail[0]) // size, self.k // size - 1
        new = k[:, known * size : stop * size]
        means[:, known:stop] = new.unflatten(1, (stop - known, size)).mean(2)
        self.known[group] = stop
        if stop <= read:
            return Selection(None, None, tail)
        queries = q[0, -1].view(len(means), -1, q.shape[-1])
        scores = (queries @ means[:, :stop].transpose(1, 2)).amax(1)
        chosen = self.blocks[group][:, :read]
        chosen.copy_(scores.topk(read).indices.sort().values)
        return Selection(chosen[None], torch.full_like(tail, read), tail, unit=size)
