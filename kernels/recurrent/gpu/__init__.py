"""Triton kernels of recurrent layers: a prompt's convolution, and Mamba-2's recurrence."""
