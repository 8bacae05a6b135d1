"""Which part of a model owns a tensor, followed through every operator of torch: on a CPU all parts
share one memory, and this shows what would fail between two devices.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(value, seen=None):
    """All tensors that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from tensors_of(one, seen)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one, seen)
    elif type(value).__module__.split(".")[0] in ("engine", "kernels"):
        for one in getattr(value, "__dict__", {}).values():
            yield from tensors_of(one, seen)


class Owned(TorchDispatchMode):
    """Follows the owners of tensors by their storage. mixed: operators whose inputs had several.
    count: operators whose inputs had one.
    """

    def __init__(self):
        super().__init__()
        self.owners, self.kept, self.mixed, self.count = {}, [], [], 0

    def own(self, part, value):
        """Say whose the tensors of a value are."""
        for tensor in tensors_of(value):
            if tensor.numel() and not tensor.is_mkldnn:
                self._note(tensor, part)

    def owner(self, tensor):
        """Whose a tensor is; None: nobody's yet."""
        if tensor.is_mkldnn or not tensor.numel():
            return None
        return self.owners.get(tensor.untyped_storage().data_ptr())

    def _note(self, tensor, part):
        self.owners[tensor.untyped_storage().data_ptr()] = part
        self.kept.append(tensor)  # its storage is not given to another one

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        # a number of one element may come from the host to any device
        owners = {self.owner(t) for t in given if t.dim()} - {None}
        if len(owners) > 1:
            self.mixed.append((func._schema.name, sorted(owners)))
        if len(owners) == 1:
            self.count += 1
            for tensor in tree_leaves(found):
                if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.is_mkldnn:
                    if self.owner(tensor) is None:
                        self._note(tensor, next(iter(owners)))
        return found


@contextmanager
def crossings(owned, model):
    """Copy what crosses from one device to another, where the engine says that it crosses: at
    `crossed`. Yields the numbers of elements that have.
    """
    counts, places = [], ("engine.forward.decode", "engine.forward.prefill")
    lists = "engine.methods.omnikv.runtime", "engine.methods.omnikv.residual"

    def crossed(x, device):
        counts.append(x.numel())
        with torch.utils._python_dispatch._disable_current_modes():
            return x.clone()  # nobody's yet: its first operator says whose it is

    def carried(x, into):
        counts.append(x.numel())
        with torch.utils._python_dispatch._disable_current_modes():
            into.copy_(x)

    with ExitStack() as stack:
        for place in (*places, "engine.methods.select.base"):
            stack.enter_context(mock.patch(f"{place}.crossed", crossed))
        for place in lists:
            stack.enter_context(mock.patch(f"{place}.carried", carried))
        yield counts
