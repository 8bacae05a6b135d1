"""llama.cpp as a peer, through its Python package: a random-weight GGUF file of the same shape, its
KV cache filled at depth.

The cache is filled without a prompt: one block is decoded, its state is set into a second sequence
and its cells are handed to the first, again and again. Duplicated keys leave softmax means
unchanged, so the logits of a step at depth must equal those after the block alone (checked,
`agreement`): all cells are attended.
"""

import ctypes
import time
from pathlib import Path

import numpy as np
import torch

from tools.bench.run import Missing

BLOCK = 512  # tokens of a batch and of the block that fills the cache
PATIENCE = 45.0  # seconds that a prompt may take; a longer one is left out and says so
VARIANTS = (("bf16", False), ("f16", False), ("f16", True))  # KV type, flash attention


def _import():
    try:
        import llama_cpp
    # a wheel built elsewhere fails with OSError, not ImportError
    except Exception as error:
        raise Missing(
            "llama-cpp-python is not installed or does not load "
            f"({' '.join(str(error).split())[:120]})"
        ) from error
    return llama_cpp


def write_gguf(config, dtype, path, seed=0):
    """A GGUF file of an engine ModelConfig with random weights in bfloat16 or float32 (norms
    float32), without a vocabulary.
    """
    try:
        import gguf
    except ImportError as error:
        raise Missing("the package gguf is not installed (pip install gguf)") from error
    if config.rope.kind != "default":
        raise Missing(
            f"this benchmark writes GGUF files with default rope only, found {config.rope.kind!r}"
        )
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    generator = torch.Generator().manual_seed(seed)
    for name, shape in _tensors(config):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
            continue
        values = torch.empty(shape, dtype=dtype).normal_(0.0, shape[1] ** -0.5, generator=generator)
        if dtype is torch.bfloat16:
            writer.add_tensor(
                name, values.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
        else:
            writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _tensors(config):
    hidden, inter = config.hidden_size, config.intermediate_size
    yield "token_embd.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        at = f"blk.{i}."
        yield at + "attn_norm.weight", (hidden,)
        yield at + "attn_q.weight", (config.q_size, hidden)
        yield at + "attn_k.weight", (config.kv_size, hidden)
        yield at + "attn_v.weight", (config.kv_size, hidden)
        yield at + "attn_output.weight", (hidden, config.q_size)
        yield at + "ffn_norm.weight", (hidden,)
        yield at + "ffn_gate.weight", (inter, hidden)
        yield at + "ffn_up.weight", (inter, hidden)
        yield at + "ffn_down.weight", (hidden, inter)
    yield "output_norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "output.weight", (config.vocab_size, hidden)


class Model:
    """A loaded GGUF file; contexts are made from it."""

    def __init__(self, path, threads, gpu=False):
        lib = self.lib = _import()
        # kept: ctypes does not hold callbacks
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = -1 if gpu else 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise Missing(f"llama.cpp {lib.__version__} does not load {path}")
        self.threads, self.version, self.vocab = (
            threads,
            lib.__version__,
            lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)),
        )

    def close(self):
        """Free the weights."""
        self.lib.llama_model_free(self.model)


class LlamaCpp:
    """One context at depth n: a contestant of tools/bench/run.py."""

    name = "llama.cpp"

    def __init__(self, model, n, room, variant=VARIANTS[0]):
        lib, self.owner, self.n = model.lib, model, n
        kind, flash = variant
        self.settings = (
            f"llama-cpp-python {model.version}, KV {kind}, flash attention "
            f"{'on' if flash else 'off'}, {model.threads} threads"
        )
        self.block = min(n, BLOCK)
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n + room + BLOCK, BLOCK, BLOCK, 2
        p.n_threads = p.n_threads_batch = model.threads
        # 30: GGML_TYPE_BF16, not named in the package
        p.type_k = p.type_v = 30 if kind == "bf16" else lib.GGML_TYPE_F16
        p.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        p.kv_unified, p.no_perf = True, True
        self.context = lib.llama_init_from_model(model.model, p)
        if not self.context:
            raise Missing(
                f"llama.cpp {model.version} makes no context of {n} tokens (KV {kind}, flash "
                f"{flash})"
            )
        self.memory = lib.llama_get_memory(self.context)
        self._batch = lib.llama_batch_init(BLOCK, 0, 1)
        self.token = 1
        self.agreement = self._fill()

    def _decode(self, tokens, first, sequence=0):
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                token,
                first + i,
                1,
                i == len(tokens) - 1,
            )
            batch.seq_id[i][0] = sequence
        status = self.owner.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        row = self.owner.lib.llama_get_logits_ith(self.context, len(tokens) - 1)
        return np.ctypeslib.as_array(row, shape=(self.owner.vocab,))

    def _fill(self):
        lib, rng = self.owner.lib, np.random.default_rng(0)
        block = self.block
        self._decode(rng.integers(0, self.owner.vocab, block).tolist(), 0)
        alone = self._decode([1], block).copy()
        self.rewind()
        size = lib.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self.context, state, size, 0)
        for _ in range(self.n // block - 1):
            if not lib.llama_state_seq_set_data(self.context, state, size, 1):
                raise RuntimeError("llama_state_seq_set_data failed")
            lib.llama_memory_seq_cp(self.memory, 1, 0, -1, -1)
            lib.llama_memory_seq_rm(self.memory, 1, -1, -1)
        difference = float(np.abs(self._decode([1], block) - alone).max())
        self.rewind()
        return difference

    def rewind(self):
        """Back to n cells: forget positions from the block's end on."""
        self.owner.lib.llama_memory_seq_rm(self.memory, 0, self.block, -1)
        self._at = self.block

    def step(self):
        """One greedy step."""
        self.token = int(self._decode([self.token], self._at).argmax())
        self._at += 1
        return self.token

    def prefill(self, ids):
        """Seconds to read a prompt into an empty cache, BLOCK tokens a batch; the filled cache is
        lost. Raises Missing beyond PATIENCE.
        """
        self.owner.lib.llama_memory_clear(self.memory, False)
        start = time.perf_counter()
        for first in range(0, len(ids), BLOCK):
            self._decode(ids[first : first + BLOCK], first)
            expected = (time.perf_counter() - start) * len(ids) / min(len(ids), first + BLOCK)
            if expected > PATIENCE:
                raise Missing(f"left out: {len(ids)} tokens would take {expected:.0f} s or more")
        return time.perf_counter() - start

    def close(self):
        """Free the context."""
        if self.context:
            self.owner.lib.llama_batch_free(self._batch)
            self.owner.lib.llama_free(self.context)
            self.context = None
