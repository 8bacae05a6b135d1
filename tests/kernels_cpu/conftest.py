"""Both forms of a CPU's kernels: C++ compiled on this machine, and torch's operators."""

from contextlib import nullcontext

import pytest

from kernels.native.library import missing, torch_only


@pytest.fixture(params=["native", "torch"], scope="module")
def form(request):
    """Run a module's tests in each form."""
    if request.param == "native" and missing():
        pytest.skip(missing())
    with torch_only() if request.param == "torch" else nullcontext():
        yield request.param


@pytest.fixture
def torch_form():
    """Run a test in torch's form."""
    with torch_only():
        yield
