"""Record what a fixed set of runs answers, selects and counts, so that a change can show that it
changed nothing.

    python -m tools.repo.answers --out before.json            every method, both tiers, three
    prompts python -m tools.repo.answers --compare before.json        run again and list every
    difference

A run is the shipped model with one method and one place for its bank. It reads a prompt, decodes,
reads a second turn, decodes, goes back into the answer and decodes again. Recorded per run: the
greedy tokens, a digest of every step's selections, a digest of the last logits' bits, and every
counter of SessionStats that is not a time. Digests of logits hold on one machine with one thread
only; tokens, selections and counters should hold on all.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

from engine import LLM, Full
from engine.methods.registry import make, methods

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "weights" / "pocket"
ANSWER = 20  # tokens decoded per turn
TIMES = (
    "prefill_seconds",
    "decode_seconds",
    "rerun_seconds",
    "pin_seconds",
    "staging_stalls",
)

OMNIKV = dict(filter_layers=(0, 3), tokens=64, tail=64, dense_below=0, wait_layers=1)
SETTINGS = {
    "omnikv": [
        OMNIKV,
        OMNIKV | dict(tokens=None, share=0.1, wait_layers=0, sink=4),
        OMNIKV | dict(residual="sample"),
        OMNIKV | dict(selector="uniform"),
        OMNIKV | dict(selector="exponential", scores="raw"),
        OMNIKV | dict(prefill_ratio=2, prefill_block=64, prefill_dense_end=64),
        OMNIKV | dict(dense_layers="block_sparse", dense_mass=0.8),
        dict(filter_layers=(0, 3), tokens=64, official=True),
        dict(filter_layers=(0, 3), share=0.1, official=True, selector="uniform"),
    ],
    "omnikvperlayer": [OMNIKV],
    "omnikvunpacked": [OMNIKV],
    "brutal_offload": [dict(layers=3, ahead=2)],
    "infllm": [dict(block=8, init=8, local=64, topk=9, representatives=2, cached=12, chunk=32)],
    "quest": [dict(tokens=80, page=8, gqa_reduce="sum"), dict(share=0.2)],
    "em_llm": [
        dict(tokens=110, sink=4, local=32, least=4, most=8, representatives=2, window=24),
        dict(share=0.2, sink=0, local=40, least=3, most=20, representatives=1, gamma=0.5),
    ],
    "clusterkv": [dict(tokens=64, segment=64, per=8), dict(share=0.2, segment=100, per=10)],
    "double_sparsity": [dict(channels=str(MODEL / "double_sparsity.json"), tokens=64, count=8)],
    "pqcache": [dict(tokens=64, sink=4, train=100), dict(share=0.2, train=64, parts=4)],
    "rocketkv": [
        dict(tokens=64, page=8, answer=32),
        dict(share=0.1, keep=128, page=4, kernel=7, channels=8, answer=16, gqa_reduce="max"),
    ],
    "shadowkv": [
        dict(tokens=64, rank=16, outliers=2, recent=16, answer=32),
        dict(share=0.1, chunk=4, outliers=3, recent=8, answer=24, gqa_reduce="mean"),
    ],
    "retroinfer": [dict(tokens=64, segment=64, per=8), dict(share=0.2, segment=100, per=10)],
    "sparq": [dict(tokens=64, r=16), dict(share=0.1, mean=False, gqa_reduce="max")],
    "a2ats": [dict(tokens=64, bits=5, train=100, window=16, distance=500)],
    "infinigen": [dict(tokens=64, alpha=2.0), dict(share=0.2, columns=4, gqa_reduce="mean")],
    "magicpig": [dict(tokens=128, bits=6, tables=40, recent=16, train=100)],
    "tidaldecode": [dict(tokens=64), dict(share=0.1, gqa_reduce="max", correction_layer=5)],
    "oracle_topk": [dict(tokens=64, tail=64), dict(share=0.1, granularity="query_head")],
    "oracle_topp": [dict(tokens=64, p=0.9), dict(share=0.2, p=0.5, granularity="layer", tail=64)],
    "random_topk": [dict(tokens=64, granularity="kv_head")],
    "kascade": [
        dict(tokens=64, anchors=(0, 2, 5), head_map=((0, 1), (1, 1), (0, 1), (1, 0)) * 2),
        dict(anchors=(0, 4), least=16),
    ],
    "kascade_tiles": [dict(tokens=64, tile=32, anchors=(0, 2, 5))],
    "hshare": [
        dict(tokens=64, layers=(0, 1, 0, 3, 1, 5, 5, 7), heads=((0, 1), (0, 0)) * 4),
        dict(share=0.2, steps=3, recent=8),
    ],
    "delta": [dict(tokens=80, page=8), dict(share=0.2, layers=(1, 3), newest=1)],
    "less_is_more": [dict(tokens=64), dict(share=0.1, layers=(1, 3), recent=0.0)],
    "minference": [{}],
    "quoka": [dict(tokens=64, queries=4, block=32)],
    "xattention": [dict(threshold=0.6, stride=8, block=32)],
    "duo": [dict(gates=((0.9, 0.1), (0.2, 0.8)) * 4, sinks=16, recent=64)],
    "fastgen": [dict(eps=0.3, special=(0, 1, 2), punctuation=(3, 4, 5), every=16)],
    "razor": [dict(heads=(((0.9, 0.1), (0.2, 0.8)) * 4,) * 2, induction=0.5, echo=0.0, recent=64)],
    "pod_untrained": [dict(blocks=(0, 2, 5), first=8, recent=64)],
    "pod_snapkv": [dict(blocks=(0, 2, 5), first=8, recent=64, tokens=96)],
    "snapkv": [dict(tokens=96)],
    "h2o": [dict(tokens=64), dict(share=0.2, cut="prefill", gqa_reduce="sum")],
    "h2o_plus": [dict(tokens=64, segment=100)],
    "snapkv_plus": [dict(tokens=64, segment=100)],
    "streaming_llm": [dict(tokens=64), dict(official=True)],
}
OTHERS = [dict(tokens=100)]  # an evicting method that has no row of its own above


def settings_of(name, cls):
    """The settings that one method runs with: a list of dicts."""
    if name in SETTINGS:
        return SETTINGS[name]
    fields = cls.__dataclass_fields__
    if "filter_layers" in fields:
        return [OMNIKV]
    return OTHERS if "tokens" in fields else [{}]


def prompts(llm):
    """Three prompts as token ids: prose, a licence, and noise."""
    welcome = llm.encode((MODEL / "welcome.txt").read_text(encoding="utf-8"))[:500]
    licence = llm.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))[:900]
    noise = torch.randint(10, 5000, (333,), generator=torch.Generator().manual_seed(5)).tolist()
    return {"welcome": welcome, "licence": licence, "noise": noise}


def digest(*values):
    """A short hash of tensors' bits and of whatever else has a repr."""
    state = hashlib.sha256()
    for value in values:
        raw = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        state.update(raw)
    return state.hexdigest()[:16]


def decode(session, logits, count):
    """Greedy tokens, and a digest of the selections of every step."""
    tokens, chosen = [], []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = session.decode(tokens[-1])
        found = session.selections
        chosen.append({layer: found[layer].tolist() for layer in sorted(found)})
    return tokens, digest(chosen), logits.contiguous()


def run(llm, method, offload, ids):
    """One run as a JSON-ready dict; a refusal is recorded by the name of its error."""
    record = {"tokens": [], "selections": [], "logits": []}

    def turn(logits):
        tokens, chosen, last = decode(session, logits, ANSWER)
        record["tokens"].append(tokens)
        record["selections"].append(chosen)
        record["logits"].append(digest(last))

    with llm.session(method, offload=offload) as session:
        turn(session.prefill(ids))
        try:
            turn(session.prefill(ids[40:140]))
            session.truncate(len(session) - 7)
            turn(session.decode(ids[3]))
            with session.fork() as fork:
                turn(fork.decode(ids[9]))
        except Exception as error:
            record["refused"] = type(error).__name__
        stats = session.stats.to_dict()
        groups = {str(key): value for key, value in stats.pop("groups").items()}
        record["stats"] = {key: value for key, value in stats.items() if key not in TIMES}
        record["stats"]["groups"] = groups
    return record


def record_all(only=()):
    """{run: record} of all runs."""
    torch.set_num_threads(1)
    found = {}
    llm = LLM(
        str(MODEL),
        device="cpu",
        dtype="float32",
        max_context=2048,
        chunk=256,
        threads=1,
        method=Full(),
        offload="device",
    )
    documents = prompts(llm)
    for name, cls in methods().items():
        if only and name not in only:
            continue
        for number, settings in enumerate(settings_of(name, cls)):
            for tier in ("device", "host"):
                for title, ids in documents.items():
                    key = f"{name}-{number} {tier} {title}"
                    found[key] = run(llm, make(name, settings), tier, ids)
            print(f"{name}-{number}", file=sys.stderr, flush=True)
    return found


def differences(before, after):
    """Lines that name every run and field that differs."""
    lines = [f"{key}: only in one record" for key in sorted(before.keys() ^ after.keys())]
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        for name in sorted(old.keys() | new.keys()):
            if name == "stats":
                keys = old[name].keys() | new[name].keys()
                lines += [
                    f"{key}: {stat} was {old[name].get(stat)}, is {new[name].get(stat)}"
                    for stat in sorted(keys)
                    if old[name].get(stat) != new[name].get(stat)
                ]
            elif old.get(name) != new.get(name):
                lines.append(f"{key}: {name} differ")
    return lines


def main(arguments=None):
    """Run, then write or compare. Exit status 1 where anything differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.repo.answers", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", metavar="FILE", help="write the record here")
    parser.add_argument("--compare", metavar="FILE", help="compare with a record made before")
    parser.add_argument("--methods", nargs="*", default=(), help="only these methods")
    options = parser.parse_args(arguments)
    found = json.loads(json.dumps(record_all(options.methods)))
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.compare:
        before = json.loads(Path(options.compare).read_text(encoding="utf-8"))
        if options.methods:
            before = {key: value for key, value in before.items() if key in found}
        lines = differences(before, found)
        print("\n".join(lines) or f"{len(found)} runs: all equal")
        return 1 if lines else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
