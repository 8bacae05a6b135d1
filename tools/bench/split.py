"""Where a decode step's time goes: linear, dense attention, scoring, top-k, gather, sparse
attention, other. Measured in a separate pass.

On a CPU the launchers are wrapped while this pass runs (never in a timed pass); on a GPU the
kernels of a replayed step are read out of torch.profiler and named by what launched them.
"""

import contextlib
import statistics
import time

import torch

import engine.bank.host.host_rows
import engine.bank.host.working_set
import engine.forward.native_layer
import engine.methods.base
import engine.methods.omnikv.runtime
from engine.forward.chain.layers import LayerChain
from kernels.layer.linear import Linear

# of a GPU's split only: kernels that neither multiply weights nor read the bank
SMALL = "norm, rotation, store"
STAGES = ("linear", "dense attention", "scoring", "top-k", "gather", "sparse attention", "other")
_LAUNCHERS = (
    (engine.methods.base, "decode_dense", "dense attention"),
    (engine.methods.omnikv.runtime, "decode_sparse", "sparse attention"),
    (engine.forward.native_layer, "multiply", "linear"),  # with norm, SwiGLU and residual
    (engine.methods.base, "select_topk", "top-k"),
    (engine.methods.omnikv.runtime, "window_scores", "scoring"),
    (engine.methods.base, "attend_stream", "dense attention"),
    (engine.bank.host.working_set.WorkingSet, "fetch", "gather"),
    # blocks and whole layers on their way to the device
    (engine.bank.host.host_rows.HostRows, "read", "gather"),
)
# Names of GPU kernels, most telling part first; a merge belongs to the attention before it.
_KERNELS = (
    ("sparse_kernel", "sparse attention"),
    ("dense_kernel", "dense attention"),
    ("head_max", "scoring"),
    ("window", "scoring"),
    ("digit_kernel", "top-k"),
    ("count_kernel", "top-k"),
    ("emit_kernel", "top-k"),
    ("move_kernel", "gather"),
    ("probe_kernel", "gather"),
    ("victims_kernel", "gather"),
    ("assign_kernel", "gather"),
    ("HtoD", "gather"),
    ("product_kernel", "linear"),
    ("few_bits_kernel", "linear"),
    ("tiles_kernel", "linear"),
    ("norm_kernel", SMALL),
    ("rotate_store_kernel", SMALL),
    ("store_kernel", SMALL),
    ("query_kernel", SMALL),
    ("triton_", SMALL),  # Inductor's, of the plain form's compiled pieces
    ("gemv", "linear"),
    ("gemm", "linear"),
    ("cutlass", "linear"),
    ("nvjet", "linear"),
    ("splitK", "linear"),
    ("cublas", "linear"),
)


def split_step(contestant, steps=3, plain_dense=None):
    """Seconds per stage of a step: {stage: seconds, "step": whole}. The stages add up to the step
    of this pass by construction; the cost of the pass shows against the timed median.
    plain_dense: seconds of one dense layer without scores, for plans without such a layer.
    """
    if contestant.llm.device.type == "cuda":
        return _split_cuda(contestant, steps)
    contestant.rewind()
    contestant.step()
    rows = []
    for _ in range(steps):
        calls = []
        with _wrapped(calls):
            start = time.perf_counter()
            contestant.step()
            whole = time.perf_counter() - start
        rows.append(_sum(calls, whole, plain_dense))
    contestant.rewind()
    middle = sorted(rows, key=lambda row: row["step"])[len(rows) // 2]
    return middle


def _sum(calls, whole, plain_dense):
    found = dict.fromkeys(STAGES, 0.0)
    plain = [
        seconds for stage, scored, seconds in calls if stage == "dense attention" and not scored
    ]
    base = statistics.median(plain) if plain else plain_dense
    for stage, scored, seconds in calls:
        if scored and base is not None:
            extra = max(0.0, seconds - base)
            found["scoring"] += extra
            seconds -= extra
        found[stage] += seconds
    found["other"] = whole - sum(found.values())
    return found | {"step": whole, "dense_layer": base}


@contextlib.contextmanager
def _wrapped(calls):
    """Time every launcher and weight product into calls: (stage, whether scores are left behind,
    seconds).

    A call inside another (attention that streams its blocks) counts for its own stage only. Layers
    are called from Python one by one.
    """
    inside = [0.0]  # seconds of finished inner calls, per call under way

    def timing(function, stage):
        def timed(*arguments, **named):
            inside.append(0.0)
            start = time.perf_counter()
            result = function(*arguments, **named)
            whole = time.perf_counter() - start
            calls.append(
                (
                    stage,
                    named.get("scores") is not None and stage == "dense attention",
                    whole - inside.pop(),
                )
            )
            inside[-1] += whole
            return result

        return timed

    undo = [(module, name, getattr(module, name)) for module, name, _ in _LAUNCHERS] + [
        (Linear, "__call__", Linear.__call__),
        (LayerChain, "ready", LayerChain.ready),
    ]
    try:
        for module, name, stage in _LAUNCHERS:
            setattr(module, name, timing(getattr(module, name), stage))
        Linear.__call__ = timing(Linear.__call__, "linear")
        LayerChain.ready = lambda *_: False  # layers that run in one call have no stages
        yield
    finally:
        for owner, name, function in undo:
            setattr(owner, name, function)


def _split_cuda(contestant, steps):
    contestant.rewind()
    for _ in range(2):
        contestant.step()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        for _ in range(steps):
            contestant.step()
        torch.cuda.synchronize()
        whole = (time.perf_counter() - start) / steps
    contestant.rewind()
    events = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    found = stages_of(events, steps)
    return found | {"step": whole, "idle": whole - sum(found.values()), "dense_layer": None}


def stages_of(events, steps):
    """Seconds per stage and step of kernels (start, end, name), in microseconds on one clock.

    A kernel counts from where the ones before it have ended: under programmatic dependent launch it
    is on the card while it waits for them, and a lane's runs beside the others.
    """
    found, last, ended = dict.fromkeys((*STAGES, SMALL), 0.0), "other", float("-inf")
    for start, end, name in sorted(events):
        stage = next((stage for part, stage in _KERNELS if part in name), None)
        if stage is None:
            stage = last if "merge" in name else "other"
        elif stage in ("dense attention", "sparse attention"):
            last = stage
        found[stage] += max(0.0, end - max(start, ended)) * 1e-6 / steps
        ended = max(ended, end)
    return found
