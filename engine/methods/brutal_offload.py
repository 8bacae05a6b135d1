"""Brutal offload: exact attention with the last layers' rows in host memory; all of them come back
in every step.

Source: the OmniKV paper's ablation without the context selector; METHODS.md item 25 and row
`brutal_offload`: the last 20 of 32 layers, each copied up while the layer four before it runs. The
baseline that shows what selection buys. The newest rows stay on the device (the ring). Over a bank
that is on the device it is full attention.
"""

from dataclasses import dataclass

from engine.methods.base import Method, Runtime
from engine.methods.settings import whole


@dataclass(frozen=True)
class BrutalOffload(Method):
    """layers: how many of the last layers live in host memory (all, where a model has fewer).
    ahead: layers between the start of a copy and its use; ahead + 1 whole layers are staged on the
    device.
    """

    layers: int = 20
    ahead: int = 4

    def __post_init__(self):
        for name in ("layers", "ahead"):
            whole(name, getattr(self, name), 1)

    @property
    def name(self):
        """Name in tables."""
        return "brutal_offload"

    @property
    def stages(self):
        """Whole layers on the device at once: the one in use and those under way."""
        return self.ahead + 1

    def packs(self, plan):
        """The last layers, each by itself: a copy is one layer."""
        return tuple(
            (layer,) for layer in range(max(0, plan.num_layers - self.layers), plan.num_layers)
        )

    def runtime(self, setup):
        """Full attention that starts copies ahead of itself."""
        return BrutalRuntime(self, setup)


class BrutalRuntime(Runtime):
    """Not capturable over an offloaded bank: how much is copied depends on the length, which the
    host knows.
    """

    differs = True  # its steps start copies, whatever they attend to

    def attend(self, layer, q, step):
        """Start the copy of the layer `ahead` further on (at the first layer, of all up to it),
        then attend to everything.
        """
        plan, last = self.setup.plan, layer + self.method.ahead
        for coming in range(0 if layer == 0 else last, min(last + 1, plan.num_layers)):
            step.bank.stage_layer(coming)
        return self.attend_dense(layer, q, step)
