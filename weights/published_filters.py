"""Filter layers of models on the hub as others have published them, and those found here of models
that no calibration file comes with.

A published set was not checked here: nobody has run these weights on this engine.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARSE_VLLM = (
    "CURRENTF/Sparse-vLLM (by OmniKV's first author; docs/en/benchmarking/"
    "sparsevllm-regression-tests.md and benchmark/sparsevllm_regression/manifest.json)"
)
KASCADE = (
    "microsoft/kascade (results/head_mappings; anchor layers of another method that shares "
    "choices between layers)"
)


@dataclass(frozen=True)
class PublishedFilters:
    """Filter layers, ascending; wait: layers after each that attend to everything, as published.

    source: where they stand. found_here: a search by loss of this project found them on this model,
    or on another form of its weights.
    """

    layers: tuple[int, ...]
    wait: int
    source: str
    found_here: bool = False

    @property
    def told(self) -> str:
        """One clause for people: where they come from, and what nobody has checked."""
        if self.found_here:
            return f"found by the search of python -m tools.calibrate, {self.source}"
        return f"published in {self.source.partition(' (')[0]}, not checked here"


_PAPER = "OmniKV, ICLR 2025"
_SMOLLM2 = (0, 3, 5, 7, 14, 17, 20, 24)

# by hub id
PUBLISHED: dict[str, PublishedFilters] = {
    "gradientai/Llama-3-8B-Instruct-262k": PublishedFilters(
        (2, 8, 18), 1, f"{_PAPER} (table of models)"
    ),
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": PublishedFilters(
        (2, 8, 18), 1, f"{_PAPER} (figure 7)"
    ),
    "meta-llama/Llama-3.1-70B-Instruct": PublishedFilters(
        (4, 19, 41), 1, f"{_PAPER} (table of models)"
    ),
    "01-ai/Yi-9B-200K": PublishedFilters((6, 11, 30), 1, f"{_PAPER} (table of models)"),
    "meta-llama/Llama-3.1-8B-Instruct": PublishedFilters((0, 2, 7, 13, 16, 26), 0, SPARSE_VLLM),
    "Qwen/Qwen2.5-7B-Instruct-1M": PublishedFilters((0, 2, 4, 11, 16, 22), 0, SPARSE_VLLM),
    "Qwen/Qwen3-4B-Instruct-2507": PublishedFilters((0, 1, 3, 9, 13, 16, 21, 28), 0, SPARSE_VLLM),
    "Qwen/Qwen3-8B": PublishedFilters((0, 2, 7, 14, 23), 0, KASCADE),
    "Qwen/Qwen3.6-27B": PublishedFilters((3, 11, 23, 31, 35, 47, 59), 0, SPARSE_VLLM),
    "HuggingFaceTB/SmolLM2-135M-Instruct": PublishedFilters(
        _SMOLLM2, 0, "on the Q4_1 form of these weights (docs/CALIBRATION.md)", True
    ),
}

# by fingerprint, then by the digest of the weights (weights/fingerprint.py)
FOUND: dict[str, dict[str, PublishedFilters]] = {
    # `make real-model`: the nearest to full attention of the sets measured in docs/FIDELITY.md, KL
    # .015 nats at a budget of 6.67%
    "19040bc4abd77ac40ad434c29538a4123380b052f3dc1bfb3ab4fee47d2783df": {
        "c741718d46dee9154f93729f891d0f64d21a04315a1e2e315689b7c30506b793": PublishedFilters(
            _SMOLLM2, 0, "on these weights (docs/CALIBRATION.md)", True
        ),
    },
}
