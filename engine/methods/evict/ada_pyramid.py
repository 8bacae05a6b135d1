"""Ada-Pyramid: PyramidKV's budgets per layer, dealt to the heads of each layer as Ada-SnapKV deals
them.

Source: Feng et al., Ada-KV (2024), section 4 (Ada-Pyramid); METHODS.md row `ada_pyramid` and
section 5, item 8. With alpha 0 it is PyramidKV, with beta 1 Ada-SnapKV.
"""

from dataclasses import dataclass

from engine.methods.evict.ada_snapkv import AdaSnapKV
from engine.methods.evict.pyramidkv import PyramidKV


@dataclass(frozen=True)
class AdaPyramid(AdaSnapKV, PyramidKV):
    """alpha as AdaSnapKV's, beta as PyramidKV's."""

    @property
    def name(self):
        """Name on the command line and in tables."""
        return "ada_pyramid"
