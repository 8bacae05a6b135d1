"""`store_step` without Triton: the reference and the CPU's slice copies put the same rows in the
same places.
"""

import pytest

from tests.kernels.support.host_checks import STORES, check_store


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", STORES)
def test_a_step_stores_its_rows(backend, shape):
    check_store("cpu", backend, 2, **shape)
