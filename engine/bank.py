"""The context bank: where all keys and values live. This file holds the device tier.

Contiguous per sequence at the planned capacity, so that dense kernels stay simple. Layers whose rows are read all together are
head-major; layers whose rows are gathered are token-major with K and V adjacent (measured: a CPU attends 1.2x to 6x faster
head-major and gathers 10x to 400x faster token-major). Callers see [B, Hkv, T, D] views of either and never learn which.
"""

import torch

from engine.plan import Role


class DeviceBank:
    """Keys and values of `batch` sequences on one device, `capacity` tokens each.

    Memory: layers * batch * capacity * 2 * kv_heads * head_dim elements, reserved at construction (a CPU commits pages as they are
    written). Rows beyond a sequence's length are undefined; whoever reads passes lengths.
    """

    def __init__(self, config, plan, capacity, dtype, device, batch=1):
        self.capacity, self.batch, self.dtype, self.device = capacity, batch, dtype, torch.device(device)
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self._token_major = [role is Role.SPARSE for role in plan.roles]
        self._layers = [self._reserve(token_major) for token_major in self._token_major]

    def _reserve(self, token_major):
        if token_major:
            shape = (self.batch, self.capacity, 2, self.kv_heads, self.head_dim)
        else:
            shape = (2, self.batch, self.kv_heads, self.capacity, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def num_layers(self):
        """Layers held."""
        return len(self._layers)

    @property
    def nbytes(self):
        """Bytes reserved on the device."""
        return sum(t.numel() * t.element_size() for t in self._layers)

    def kv(self, layer, stop=None):
        """K and V of one layer as [B, Hkv, T, D] views, T = capacity or `stop`; strides are the layout's private matter."""
        rows = self._layers[layer]
        if self._token_major[layer]:
            rows = rows.permute(2, 0, 3, 1, 4)
        k, v = rows[0], rows[1]
        return (k, v) if stop is None else (k[:, :, :stop], v[:, :, :stop])

    def write(self, layer, k, v, positions):
        """Write rows k, v [B, Q, Hkv, D] at positions [B, Q] int64. On a GPU no position visits the host."""
        bank_k, bank_v = self.kv(layer)
        if self.device.type == "cpu":
            for b, start in enumerate(positions[:, 0].tolist()):        # positions are consecutive: one slice copy each
                stop = start + k.shape[1]
                bank_k[b, :, start:stop] = k[b].transpose(0, 1)
                bank_v[b, :, start:stop] = v[b].transpose(0, 1)
            return
        rows = torch.arange(self.batch, device=self.device).unsqueeze(1)
        bank_k.transpose(1, 2)[rows, positions] = k
        bank_v.transpose(1, 2)[rows, positions] = v

    def write_chunk(self, layer, k, v, start):
        """Write rows k, v [B, C, Hkv, D] at start .. start + C - 1 of every sequence (prefill; start is an int)."""
        bank_k, bank_v = self.kv(layer)
        stop = start + k.shape[1]
        bank_k[:, :, start:stop] = k.transpose(1, 2)
        bank_v[:, :, start:stop] = v.transpose(1, 2)

    def blocks(self, layer, start, stop, size=65536):
        """Stream rows start .. stop-1 of a layer in order: yields (first, K, V) with K, V [B, Hkv, <= size, D] on the device."""
        k, v = self.kv(layer)
        for first in range(start, stop, size):
            last = min(stop, first + size)
            yield first, k[:, :, first:last], v[:, :, first:last]

    def relayout(self, plan):
        """Give every layer the layout that `plan` wants, rows kept; needs one layer's bytes on top while it runs."""
        for layer, role in enumerate(plan.roles):
            want = role is Role.SPARSE
            if self._token_major[layer] == want:
                continue
            k, v = self.kv(layer)
            self._layers[layer] = self._reserve(want)
            self._token_major[layer] = want
            new_k, new_v = self.kv(layer)
            new_k.copy_(k)
            new_v.copy_(v)

    def copy_from(self, other, length):
        """Copy the first `length` rows of another bank of the same model (fork)."""
        for layer in range(self.num_layers):
            for mine, theirs in zip(self.kv(layer), other.kv(layer)):
                mine[:, :, :length] = theirs[:, :, :length]

    def close(self):
        """Give the memory back."""
        self._layers = []
