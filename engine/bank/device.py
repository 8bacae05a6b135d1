"""The context bank: where all keys and values live. This file holds the device tier.

Contiguous per sequence at the planned capacity, so that dense kernels stay simple. Layers whose
rows are read all together are head-major; layers whose rows are gathered are token-major with K and
V adjacent (measured: a CPU attends 1.2x to 6x faster head-major and gathers 10x to 400x faster
token-major). Callers see [B, Hkv, T, D] views of either and never learn which.
"""

import contextlib

import torch

from engine.plan.layers import Role
from kernels.store import store_step


class DeviceBank:
    """Keys and values of `batch` sequences on one device, `capacity` tokens each.

    Memory: layers * batch * capacity * 2 * kv_heads * head_dim elements, reserved at construction
    (a CPU commits pages as they are written). Rows beyond a sequence's length are undefined;
    whoever reads passes lengths. hosted: layers that are kept elsewhere (nothing is reserved for
    them); donor: a bank of the same model whose rows of the others are taken over.
    """

    tiered = False  # whether rows may live in host memory (engine/bank/tiered.py)
    host_nbytes = 0

    def __init__(self, config, plan, capacity, dtype, device, batch=1, hosted=(), donor=None):
        self.capacity, self.batch, self.dtype, self.device = (
            capacity,
            batch,
            dtype,
            torch.device(device),
        )
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self._token_major = [role is Role.SPARSE for role in plan.roles]
        self._layers = [None] * len(plan.roles)
        for layer in range(len(plan.roles)):
            if layer in hosted:
                continue
            if donor is None or donor._layers[layer] is None:
                self._layers[layer] = self._reserve(self._token_major[layer])
            else:
                self._layers[layer], self._token_major[layer] = (
                    donor._layers[layer],
                    donor._token_major[layer],
                )
        if donor is not None:
            DeviceBank.relayout(self, plan)

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
        return sum(t.numel() * t.element_size() for t in self._layers if t is not None)

    def kv(self, layer, stop=None):
        """K and V of one layer as [B, Hkv, T, D] views, T = capacity or `stop`; strides are the
        layout's private matter.
        """
        rows = self._layers[layer]
        if self._token_major[layer]:
            rows = rows.permute(2, 0, 3, 1, 4)
        k, v = rows[0], rows[1]
        return (k, v) if stop is None else (k[:, :, :stop], v[:, :, :stop])

    def write(self, layer, k, v, q_pre_rope, ring, positions):
        """Write a step's rows k, v [B, Q, Hkv, D] at positions [B, Q] int64, and q_pre_rope [B, Q,
        H, D] into the layer's ring (QueryRing).

        On a GPU no position visits the host.
        """
        store_step(k, v, q_pre_rope, *self.kv(layer), ring.slots[layer], positions)

    def write_chunk(self, layer, k, v, start):
        """Write rows k, v [B, C, Hkv, D] at start .. start + C - 1 of every sequence (prefill;
        start is an int).
        """
        bank_k, bank_v = self.kv(layer)
        stop = start + k.shape[1]
        bank_k[:, :, start:stop] = k.transpose(1, 2)
        bank_v[:, :, start:stop] = v.transpose(1, 2)

    def blocks(self, layer, start, stop, size=65536):
        """Stream rows start .. stop-1 of a layer in order: yields (first, K, V) with K, V [B, Hkv,
        <= size, D] on the device.
        """
        k, v = self.kv(layer)
        for first in range(start, stop, size):
            last = min(stop, first + size)
            yield first, k[:, :, first:last], v[:, :, first:last]

    def relayout(self, plan, placement=None):
        """The bank that serves another layer plan, rows kept: this one, with every layer in the
        layout that `plan` wants.

        Needs one layer's bytes on top while it runs. placement: what a tiered bank would offload;
        here rows stay on the device.
        """
        for layer, role in enumerate(plan.roles):
            want = role is Role.SPARSE
            if self._token_major[layer] == want or self._layers[layer] is None:
                continue
            k, v = DeviceBank.kv(self, layer)
            self._layers[layer] = self._reserve(want)
            self._token_major[layer] = want
            new_k, new_v = DeviceBank.kv(self, layer)
            new_k.copy_(k)
            new_v.copy_(v)
        return self

    def copy_from(self, other, length):
        """Copy the first `length` rows of another bank of the same model (fork)."""
        for layer in range(self.num_layers):
            self._copy_layer(layer, other, length)

    def _copy_layer(self, layer, other, length):
        for mine, theirs in zip(self.kv(layer, length), other.kv(layer, length)):
            mine.copy_(theirs)

    # What a bank with a host tier does around a step; nothing to do here.

    def hosts(self, layer):
        """Whether a layer's rows live in host memory."""
        return False

    def streams(self, layer, backend):
        """Whether dense decode attention to a layer must go block by block
        (engine/bank/streamed_attention.py).
        """
        return False

    def capturable(self, runtime):
        """Whether steps of this runtime over this bank can be captured into a CUDA graph."""
        return True

    def before_step(self, n):
        """The next step makes the bank n tokens long."""

    def after_step(self, n):
        """A step that made the bank n tokens long has been issued."""

    def rehearsal(self, n):
        """Context manager: steps inside make the bank n tokens long once more, as it was; nothing
        of them stays.
        """
        return contextlib.nullcontext()

    def rewind(self, n, broken=False):
        """Forget positions n and beyond: truncate, or (broken) a chunk or step that was broken off
        somewhere.
        """

    def stage(self, layer):
        """Start bringing a whole layer over."""

    def fetch(self, layers, index, counts):
        """A filter layer has chosen index [B, 1, K], counts [B] for these sparse layers."""

    def arrived(self, layers):
        """The current stream waits until what was fetched for these layers is there; the indices
        may then be written again.
        """

    def selected(self, layer, index, counts, start, step, packed=True):
        """(k, v, index, counts, tail start, lengths) as `decode_sparse` takes them, for a selection
        and the tail from `start` [B].
        """
        return *self.kv(layer, step.bucket), index, counts, start, step.visible

    def counters(self):
        """{first layer of an offloaded group: (hits, misses, evictions, plans, bytes)} since the
        beginning.
        """
        return {}

    def close(self):
        """Give the memory back."""
        self._layers = []
