"""What the methods that keep everything and read a part share: a budget in tokens or as a share, plans of one group a layer, checks."""

import math

from engine.errors import SettingError
from engine.plan import Group, LayerPlan, Role

DEFAULT_TOKENS = 2048


class Budgeted:
    """For a frozen method with the fields tokens and share: rows that a sparse layer reads per step."""

    def check_budget(self):
        """Raise SettingError unless at most one of tokens (an int >= 1) and share (a number in (0, 1]) is given."""
        if self.tokens is not None and self.share is not None:
            raise SettingError(f"budget: found tokens={self.tokens} and share={self.share}, expected at most one of them")
        if self.tokens is not None:
            whole("tokens", self.tokens, 1)
        share = self.share
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise SettingError(f"share: found {share!r}, expected a number in (0, 1]")

    def budget(self, length):
        """Tokens, where the bank held `length` of them at the end of the latest prefill."""
        if self.share is not None:
            return max(1, math.floor(self.share * length))
        return DEFAULT_TOKENS if self.tokens is None else self.tokens


def whole(name, value, least, most=None):
    """Raise SettingError unless a field is an int from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
        raise SettingError(f"{name}: found {value!r}, expected {limit}")


def choice(name, value, allowed):
    """Raise SettingError unless a field is one of `allowed`."""
    if value not in allowed:
        raise SettingError(f"{name}: found {value!r}, expected one of {', '.join(map(str, allowed))}")


def layers_apart(num_layers, sparse):
    """The plan in which the layers `sparse` are SPARSE, each in a group of its own, and all others FULL."""
    sparse = sorted(sparse)
    number = {layer: i for i, layer in enumerate(sparse)}
    roles = tuple(Role.SPARSE if layer in number else Role.FULL for layer in range(num_layers))
    return LayerPlan(roles, tuple(Group(layer, (layer,)) for layer in sparse), tuple(map(number.get, range(num_layers))))
