"""Ada-Pyramid: PyramidKV's budgets per layer, divided among the heads of each layer as in
Ada-SnapKV.

Source: Feng et al., Ada-KV (2024), section 4 (Ada-Pyramid). With alpha 0 it is PyramidKV, with beta
1 Ada-SnapKV.
"""

from dataclasses import dataclass

from engine.methods.evict.ada_snapkv import AdaSnapKV
from engine.methods.evict.pyramidkv import PyramidKV


@dataclass(frozen=True)
class AdaPyramid(AdaSnapKV, PyramidKV):
    """alpha as AdaSnapKV's, beta as PyramidKV's."""

    @property
    def name(self) -> str:
        return "ada_pyramid"
