"""Run tests as an ARM of 64 bits runs them, on an x86 with Debian. QEMU emulates the processor, the
cross compiler makes the C++ kernels, and Python and torch are those of an ARM.
"""
