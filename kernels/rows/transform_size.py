"""How many elements of a row the Hadamard transform mixes, and what it divides by
(kernels/rows/hadamard.py).
"""

from __future__ import annotations


def run_length(head_dim: int) -> int:
    """Count the elements of a half that are mixed with each other: the largest power of two that
    divides it. head_dim is even.
    """
    half = head_dim // 2
    return half & -half


def row_factor(head_dim: int) -> int:
    """Return the power of two that transformed rows are divided by: 8 for 64 and for 128."""
    return 1 << ((2 * run_length(head_dim)).bit_length() - 1) // 2


def query_factor(head_dim: int) -> int:
    """Return the power of two that transformed queries are divided by: 8 for 64, 16 for 128."""
    return 2 * run_length(head_dim) // row_factor(head_dim)
