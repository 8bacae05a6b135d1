"""The offline search of MInference: which pattern each query head of a model gets, by the dense
attention mass that it keeps.

Source: microsoft/MInference, search_pattern (minference_forward.py): its space, and its criterion,
the mean over queries of the mass kept. There a best A-shape becomes the vertical-slash of the same
numbers and a best block-sparse ("vertical_slash", 1000, 6096); here a head keeps the pattern that
was best.
"""

import torch

from engine.bank.device import DeviceBank
from engine.methods.base import Setup
from engine.methods.select.minference import MInference, MInferenceRuntime
from engine.methods.select.minference_patterns import checked
from engine.prefill import run_chunk
from kernels.prefill import prefill_dense_lse
from kernels.scratch import make_scratch

SPACE = (
    ("a_shape", 100, 800),
    ("vertical_slash", 30, 800),
    ("vertical_slash", 100, 750),
    ("vertical_slash", 500, 700),
    ("vertical_slash", 3500, 100),
    ("block_sparse", 100),
)


class SearchRuntime(MInferenceRuntime):
    """Dense prefill that measures: kept float64 [patterns, layers, query heads], mass summed over
    queries.
    """

    def __init__(self, method, setup, space):
        super().__init__(method, setup)
        self.space = space
        self.kept = torch.zeros(
            len(space), setup.config.num_layers, setup.config.num_heads, dtype=torch.float64
        )

    def prefill_attend(self, layer, q, bank, start):
        """Dense attention; every pattern of the space is tried beside it."""
        k, v = bank.kv(layer)
        out, lse = prefill_dense_lse(q, k, v, start, self.scale)
        for i, pattern in enumerate(self.space):
            mine = self.attend_patterns((pattern,) * q.shape[2], q, k, v, start)[1]
            self.kept[i, layer] += torch.exp(mine - lse).sum((0, 1)).cpu()
        return out


def search_patterns(llm, token_ids, space=SPACE, progress=None):
    """The table [layer][query head] for MInference(patterns=...): of `space`, what keeps most of a
    prompt's dense attention mass.

    token_ids: the prompt, read in chunks of the LLM's size as later prompts will be. The first
    pattern wins a tie. Needs a device bank of the prompt for itself. progress(done tokens, all
    tokens) after each chunk.
    """
    config, method = llm.config, MInference()
    plan, total = method.plan(config), len(token_ids)
    scratch = make_scratch(
        1, 1, config.num_heads, config.num_kv_heads, config.head_dim, total, 0, llm.device, False, 0
    )
    setup = Setup(config, plan, total, llm.device, llm.dtype, 1, llm.backend, scratch)
    runtime, bank = (
        SearchRuntime(method, setup, tuple(map(checked, space))),
        DeviceBank(config, plan, total, llm.dtype, llm.device),
    )
    with llm.busy(), torch.inference_mode():
        for first in range(0, total, llm.chunk):
            last = min(total, first + llm.chunk)
            tokens = torch.tensor(
                [list(token_ids[first:last])], dtype=torch.int64, device=llm.device
            )
            run_chunk(llm.model, llm.rotary, runtime, bank, tokens, first, total)
            if progress is not None:
                progress(last, total)
    return tuple(tuple(runtime.space[i] for i in row) for row in runtime.kept.argmax(0).tolist())
