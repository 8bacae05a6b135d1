"""Both forms of a CPU's kernels: C++ compiled on this machine, and torch's operators."""

from contextlib import nullcontext

import pytest
import torch

from kernels.native.library import missing
from tests.no_compiler import no_compiler


@pytest.fixture(params=["native", "torch"], scope="module")
def form(request):
    """Run a module's tests in each form."""
    if request.param == "native" and missing():
        pytest.skip(missing())
    with no_compiler() if request.param == "torch" else nullcontext():
        yield request.param


@pytest.fixture
def torch_form():
    """Run a test in torch's form."""
    with no_compiler():
        yield


@pytest.fixture
def set_threads():
    """Sets the number of threads; the test's end brings it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
