"""What the methods that keep everything and read a part share: a budget in tokens or as a share,
plans of one group a layer.
"""

import math

from engine.methods.settings import one_budget, portion, whole
from engine.plan.layers import Group, LayerPlan, Role

DEFAULT_TOKENS = 2048


class Budgeted:
    """For a frozen method with the fields tokens and share: rows that a sparse layer reads per
    step.
    """

    def check_budget(self):
        """Raise SettingError unless at most one of tokens (an int >= 1) and share (a number in (0,
        1]) is given.
        """
        one_budget(self, "tokens", "share")
        if self.tokens is not None:
            whole("tokens", self.tokens, 1)
        if self.share is not None:
            portion("share", self.share)

    def budget(self, length):
        """Tokens, where the bank held `length` of them at the end of the latest prefill."""
        if self.share is not None:
            return max(1, math.floor(self.share * length))
        return DEFAULT_TOKENS if self.tokens is None else self.tokens


def layers_apart(num_layers, sparse):
    """The plan in which the layers `sparse` are SPARSE, each in a group of its own, and all others
    FULL.
    """
    sparse = sorted(sparse)
    number = {layer: i for i, layer in enumerate(sparse)}
    roles = tuple(Role.SPARSE if layer in number else Role.FULL for layer in range(num_layers))
    return LayerPlan(
        roles,
        tuple(Group(layer, (layer,)) for layer in sparse),
        tuple(map(number.get, range(num_layers))),
    )
