"""The paper's two ablations of the context bank: a selection per layer instead of per group, and
loads without packing.

Source: OmniKV paper, Table 7 ("without context bank"); METHODS.md row `omnikv_per_layer` and item
23 (`without_pack`).
"""

from dataclasses import dataclass

from engine.errors import SettingError
from engine.methods.omnikv.settings import OmniKV, OmniKVRuntime
from engine.plan.layers import Group, LayerPlan, Role


@dataclass(frozen=True)
class OmniKVPerLayer(OmniKV):
    """Every layer from the first filter layer on scores everything itself and attends to its own
    choice; nothing is reused.

    Settings as OmniKV's; of filter_layers only the first counts. Over an offloaded bank every
    layer's keys come back to be scored: what this shows is that selection without sharing saves no
    bytes.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.official or self.prefill_ratio is not None:
            raise SettingError(
                "omnikv_per_layer: official and prefill_ratio do not go with a selection per layer; leave them out"
            )

    @property
    def name(self):
        """Name in tables."""
        return "omnikv_per_layer"

    @property
    def selects(self):
        """Scores need every key, so rows come over whole; slots would serve nothing."""
        return False

    def plan(self, config):
        """FULL below the first filter layer; above, every layer is SPARSE under a group of its own."""
        first, count = (self.filter_layers or (0,))[0], config.num_layers
        if first >= count:
            raise SettingError(
                f"filter_layers: found {first}, expected numbers from 0 to {count - 1} (the model has {count} layers)"
            )
        groups = tuple(Group(layer, (layer,)) for layer in range(first, count))
        roles = (Role.FULL,) * first + (Role.SPARSE,) * (count - first)
        return LayerPlan(roles, groups, (None,) * first + tuple(range(count - first)))

    def runtime(self, setup):
        """Selection buffers of every layer."""
        return PerLayerRuntime(self, setup)


class PerLayerRuntime(OmniKVRuntime):
    """Each sparse layer chooses, then reads what it chose."""

    packed = False

    def attend_sparse(self, layer, q, step):
        """Score everything, keep the choice, attend to it and to the tail."""
        self.attend_and_select(layer, q, step)
        return super().attend_sparse(layer, q, step)


@dataclass(frozen=True)
class OmniKVUnpacked(OmniKV):
    """OmniKV whose sparse layers load one by one: indices to the host, a gather there, a copy that
    is waited for, nothing kept.
    """

    @property
    def name(self):
        """Name in tables."""
        return "omnikv_unpacked"

    @property
    def selects(self):
        """Nothing is kept on the device from step to step."""
        return False

    def packs(self, plan):
        """Every sparse layer by itself."""
        return tuple((layer,) for layer in plan.sparse_layers)

    def runtime(self, setup):
        """OmniKV's, with loads that nothing hides."""
        runtime = super().runtime(setup)
        runtime.packed = False
        return runtime
