"""Programmatic dependent launch: a kernel of a decode step is set up while the one before it still
runs, and waits in its first lines for that one's results.

A step is a chain of some 300 short kernels, and the gap between two of them (launch, fill and
drain) is a microsecond or two. With this launch attribute (CUDA's programming guide, section
"Programmatic dependent launch and synchronization"; sm_90 and later) the gap is overlapped. A
product also loads its first weights before it waits, since no kernel of a step writes weights.
"""

from __future__ import annotations

import torch

from kernels.launch.shapes import card
from kernels.launch.triton import tl, triton

LEAST_CAPABILITY = (9, 0)

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a triton without them, or none

    @triton.jit
    def gdc_wait():
        tl.static_assert(False, "this triton has no dependent launch")

    @triton.jit
    def gdc_launch_dependents():
        tl.static_assert(False, "this triton has no dependent launch")

    HAVE_DEPENDENT = False
else:
    HAVE_DEPENDENT = True


@triton.jit
def wait_for_last_kernel(DEPENDENT: tl.constexpr):
    """Wait until all that the kernel before this one in the stream has written is there, and let
    the next one be set up.

    Every program of every kernel that is launched with `dependent` calls this before it reads or
    writes anything that a step changes, also one that then leaves at once: only so does the end of
    one kernel mean the end of all before it.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


# cards on which a self-test found that such launches fail or compute something else
_REFUSED: set[int] = set()


def refuse(device: torch.device) -> None:
    """Launch the kernels of a device one after the other from now on, in this process."""
    _REFUSED.add(device.index or 0)


def supported(device: torch.device) -> bool:
    """Whether kernels on a device may be launched before the ones in front of them have ended."""
    return (device.index or 0) not in _REFUSED and _possible(device)


def _possible(device: torch.device) -> bool:
    if not HAVE_DEPENDENT or torch.version.hip is not None:
        return False
    found = card(device)
    return found is not None and found.capability >= LEAST_CAPABILITY


def dependent(tensor: torch.Tensor) -> dict[str, bool]:
    """What a launch on `tensor`'s device takes: the kernel's constant, and the launch attribute."""
    if supported(tensor.device):
        return dict(DEPENDENT=True, launch_pdl=True)
    return dict(DEPENDENT=False)
