"""A few weights of every row, as a sparse product on a CPU: what a row's int8 scale left out."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

# up to here a product for each row, which takes a third of the time of a product for many
SINGLE_ROWS = 2
SUMMED = 64  # rows of x whose columns are summed at a time; 16 take twice as long for each
FEW_ROWS = 16  # up to here the CSR product is faster than summing columns of x


class SparseRows:
    """A matrix [O, I] with n weights in every row.

    places: int32 [O, n], ascending; outliers: float32 [O, n].
    """

    def __init__(self, places: torch.Tensor, outliers: torch.Tensor, columns: int) -> None:
        rows, count = places.shape
        self.places, self.outliers = places.contiguous(), outliers.contiguous()
        starts = torch.arange(0, rows * count + 1, count, dtype=torch.int32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in beta state"
            # shares memory with places and outliers
            self.csr = torch.sparse_csr_tensor(
                starts,
                self.places.flatten(),
                self.outliers.flatten(),
                (rows, columns),
                check_invariants=False,
            )

    @staticmethod
    def bytes_of(rows: int, count: int) -> int:
        """Bytes of places, outliers and the starts of rows."""
        return 8 * rows * count + 4 * (rows + 1)

    def multiply(self, flat: torch.Tensor) -> torch.Tensor:
        """Multiply float32 rows [R, I]: [R, O]."""
        if len(flat) == 1:
            return torch.mv(self.csr, flat[0])[None]
        if len(flat) <= SINGLE_ROWS:
            return torch.stack([torch.mv(self.csr, row) for row in flat])
        if len(flat) <= FEW_ROWS:
            return (self.csr @ flat.t().contiguous()).t()
        # rows of the result as they are used: adding its transpose takes ten times as long
        out = flat.new_empty(len(flat), len(self.places))
        for start in range(0, len(flat), SUMMED):
            part = slice(start, start + SUMMED)
            out[part] = F.embedding_bag(
                self.places,
                flat[part].t().contiguous(),
                per_sample_weights=self.outliers,
                mode="sum",
            ).t()
        return out
