"""`store_step` without Triton: the reference and the CPU's slice copies put the same rows in the
same places.
"""

import pytest

from tests.host_checks import STORES, check_store


@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("shape", STORES)
def test_a_step_stores_its_rows(path, shape):
    check_store("cpu", path, 2, **shape)
