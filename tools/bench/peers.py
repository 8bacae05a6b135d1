"""Other engines in the benchmark: made once per run, a contestant per depth, with the best settings
of a short trial.
"""

import tempfile
from pathlib import Path

import torch

from tools.bench.run import Missing

PEERS = ("transformers", "llama.cpp")


def make_peer(name, llm, options):
    """A peer by name for an LLM's shape and dtype; raises Missing with the reason where it cannot
    run.
    """
    if name == "transformers":
        return _Transformers(llm)
    if name == "llama.cpp":
        return _LlamaCpp(llm)
    raise Missing(f"unknown peer {name!r}: expected one of {', '.join(PEERS)}")


class _Transformers:
    name = "transformers"

    def __init__(self, llm):
        from tools.bench.hf import load_model

        self.llm, self.trials, self.variant = llm, {}, None
        self.model = load_model(llm.config, llm.dtype, llm.device)
        self.settings = "transformers"

    def bytes_at(self, n):
        """Bytes of one cache; a dynamic one holds a layer twice while it grows."""
        return (
            n * self.llm.config.kv_bytes(self.llm.dtype.itemsize) * (self.llm.config.num_layers + 1)
        )

    def at(self, n, room):
        """A maker of the contestant at depth n, in the variant that a trial at this depth found
        fastest.
        """
        from tools.bench.hf import VARIANTS, Transformers, best_variant

        # eager attention loses by more the deeper it goes
        few = VARIANTS if n <= 8192 else VARIANTS[:2]
        self.variant, self.trials[n] = best_variant(self.model, n, room, few)
        return lambda: Transformers(self.model, n, room, self.variant)

    def prefill(self, ids):
        """Seconds for a whole prompt with the sdpa form."""
        from tools.bench.hf import Transformers

        return Transformers(self.model, 1, 1, ("dynamic", "sdpa")).prefill(ids)

    def close(self):
        """Drop the model."""
        self.model = None


class _LlamaCpp:
    name = "llama.cpp"

    def __init__(self, llm):
        from tools.bench.llamacpp import Model, write_gguf

        if llm.dtype not in (torch.bfloat16, torch.float32):
            raise Missing(f"GGUF files are written in bfloat16 or float32 here, found {llm.dtype}")
        self.llm, self.variant, self.trials = llm, None, {}
        self._folder = tempfile.TemporaryDirectory(prefix="omnikv-bench-")
        try:
            path = write_gguf(llm.config, llm.dtype, Path(self._folder.name) / "random.gguf")
            self.model = Model(path, torch.get_num_threads(), gpu=llm.device.type == "cuda")
        except BaseException:
            self._folder.cleanup()
            raise
        self.settings = f"llama-cpp-python {self.model.version}"

    def bytes_at(self, n):
        """Bytes of a 16-bit KV cache."""
        return n * self.llm.config.kv_bytes(2) * self.llm.config.num_layers

    def at(self, n, room):
        """A maker of the contestant at depth n; the KV type and attention form are those that a
        trial at 8K tokens or less chose.
        """
        from tools.bench.llamacpp import LlamaCpp

        if self.variant is None:
            self.variant = self._trial(min(n, 8192))
        return lambda: LlamaCpp(self.model, n, room, self.variant)

    def _trial(self, n):
        import time

        from tools.bench.llamacpp import VARIANTS, LlamaCpp

        best = {}
        for variant in VARIANTS:
            try:
                peer = LlamaCpp(self.model, n, 64, variant)
            except Missing:
                continue
            peer.step()
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                peer.step()
                seconds.append(time.perf_counter() - start)
            peer.close()
            best[variant] = min(seconds)
        if not best:
            raise Missing("llama.cpp made no context in any of the tried forms")
        self.trials[n] = {
            f"KV {kind}{', flash' if flash else ''}": round(1e3 * s, 2)
            for (kind, flash), s in best.items()
        }
        return min(best, key=best.get)

    def prefill(self, ids):
        """Seconds for a whole prompt in an empty context."""
        from tools.bench.llamacpp import VARIANTS, LlamaCpp

        peer = LlamaCpp(self.model, 64, len(ids), self.variant or VARIANTS[0])
        try:
            return peer.prefill(ids)
        finally:
            peer.close()

    def close(self):
        """Free the weights and the file."""
        self.model.close()
        self._folder.cleanup()
