"""Ada-Pyramid: PyramidKV's budgets per layer, dealt to the heads of each layer as Ada-SnapKV deals them.

Source: Feng et al., Ada-KV (2024), section 4 (Ada-Pyramid); METHODS.md row `ada_pyramid` and section 5, item 8. With alpha 0 it is
PyramidKV, with beta 1 Ada-SnapKV.
"""

from dataclasses import dataclass

from engine.methods.ada_snapkv import AdaRuntime
from engine.methods.checks import portion
from engine.methods.pyramidkv import PyramidKV


@dataclass(frozen=True)
class AdaPyramid(PyramidKV):
    """alpha: weight of the adaptive budgets, in [0, 1]; the rest as PyramidKV."""

    alpha: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        portion("alpha", self.alpha, zero=True)

    @property
    def name(self):
        """Name on the command line and in tables."""
        return "ada_pyramid"

    def runtime(self, setup):
        """Stores of one session, one per head."""
        return AdaRuntime(self, setup)
