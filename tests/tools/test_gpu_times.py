"""Times of single kernels and of a step's stages on a GPU, from clocks and events that are planted.

Stops: a verdict on a kernel that is a verdict on a graph's launch; a split of a step that does not
know the engine's own kernels, or that counts the same microsecond twice.
"""

import pytest
import torch

from tests.fake_gpu import FakeGPU
from tools.bench.split import SMALL, stages_of
from tools.gpu import kernels as gpu_kernels


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGPU(monkeypatch, cards=1)
    monkeypatch.setattr(gpu_kernels, "_flushed", lambda elements: torch.zeros(min(elements, 4)))
    gpu_kernels._launch_seconds.cache_clear()
    yield fake
    gpu_kernels._launch_seconds.cache_clear()


@pytest.mark.parametrize("launches", [1, 5])
def test_a_kernels_time_has_no_graphs_launch_in_it(gpu, launches):
    """7 us of a replay belong to no kernel. Four products of few bits a layer had 28 of them beside
    a floor of 31.7, so that none could reach 75% of it.
    """
    gpu.launch, gpu.kernel = 7e-6, 1e-6
    x = torch.zeros(4)

    def function():
        for _ in range(launches):
            x.add_(1)

    found = gpu_kernels.median_time(function, "cuda", repeats=3)
    assert found == pytest.approx(launches * 1e-6, rel=1e-3)


def test_a_kernel_below_the_clocks_noise_takes_no_negative_time(gpu):
    gpu.launch, gpu.kernel = 7e-6, 0.0
    assert gpu_kernels.median_time(lambda: None, "cuda", repeats=3) > 0


STEP = [
    ("product_kernel", "linear"),
    ("few_bits_kernel", "linear"),
    ("tiles_kernel", "linear"),
    ("norm_kernel", SMALL),
    ("rotate_store_kernel", SMALL),
    ("store_kernel", SMALL),
    ("query_kernel", SMALL),
    ("triton_red_fused_add_mean_mul_rsqrt_0", SMALL),
    ("dense_kernel", "dense attention"),
    ("merge_kernel", "dense attention"),
    ("sparse_kernel", "sparse attention"),
    ("merge_kernel", "sparse attention"),
    ("digit_kernel", "top-k"),
    ("move_kernel", "gather"),
    ("nvjet_sm90_tst_64x8", "linear"),
    ("Memcpy DtoD", "other"),
]


def test_every_kernel_of_a_step_has_its_stage():
    events = [(10.0 * i, 10.0 * i + 4, name) for i, (name, _) in enumerate(STEP)]
    found = stages_of(events, steps=2)
    for stage in {stage for _, stage in STEP}:
        count = sum(stage == other for _, other in STEP)
        assert found[stage] == pytest.approx(count * 4e-6 / 2), stage
    assert sum(found.values()) == pytest.approx(len(STEP) * 2e-6)


def test_kernels_that_overlap_count_once():
    """A dependent kernel is on the card while it waits; a lane's gather runs inside a product."""
    events = [
        (0.0, 10.0, "product_kernel"),
        (8.0, 14.0, "norm_kernel"),  # waits for two microseconds
        (9.0, 12.0, "move_kernel"),  # wholly beside the others
        (14.0, 20.0, "dense_kernel"),
    ]
    found = stages_of(events, steps=1)
    assert found["linear"] == pytest.approx(10e-6) and found[SMALL] == pytest.approx(4e-6)
    assert found["gather"] == 0 and sum(found.values()) == pytest.approx(20e-6)
