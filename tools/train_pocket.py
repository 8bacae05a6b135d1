"""Trains the model this project ships, from scratch: `python -m tools.train_pocket --minutes 70` on
two CPU cores, `--profile gpu` on one GPU.

A run grows its rows from 64 to 4,096 tokens, stage by stage, by accuracy (or when a stage's share
of the time is used up), checks at each stage that retrieval took off, and saves everything it needs
to go on (`--out`, written beside and renamed) every 100 seconds: the same command resumes.
"""

import argparse
import math
import os
import sys
import time
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.nn import functional as F

from tools.pocket import data as pocket_data
from tools.pocket import model as pocket_model
from tools.pocket.optim import Muon
from tools.pocket.tokenizer import save_tokenizer, train_tokenizer

KINDS = ("recall", "copy", "arithmetic", "delayed", "refuse", *sorted(pocket_data.TASKS))
# accuracy is judged over the last WINDOW x LOG_STEPS steps
SAVE_SECONDS, LOG_STEPS, WINDOW = 100, 20, 4


@dataclass(frozen=True)
class Stage:
    """Rows of `length`; over when `goal` (kind -> accuracy) is met after `least` steps, or when
    `until` of the run's time is gone. `check`: (steps, kind, accuracy) that must be reached by
    then, else the run stops as hopeless. mixed: shorter rows now and then.
    """

    length: int
    goal: dict
    until: float
    least: int = 100
    check: tuple = ()
    mixed: tuple = ()
    halved: bool = False


STAGES = (
    Stage(64, {"recall": 0.85}, 0.1, 200, ((300, "recall", 0.3), (600, "recall", 0.7))),
    Stage(128, {"kv": 0.85, "recall": 0.9, "passkey": 0.9}, 0.16, 200, ((600, "kv", 0.2),)),
    Stage(
        256,
        {"kv": 0.95, "two_stage": 0.9, "facts": 0.9, "chains": 0.9},
        0.32,
        300,
        ((1000, "kv", 0.5),),
        (128,),
    ),
    Stage(
        512,
        {"kv": 0.97, "two_stage": 0.95, "facts": 0.95, "chains": 0.95},
        0.47,
        300,
        (),
        (256, 128),
        True,
    ),
    Stage(
        1024,
        {"kv": 0.98, "two_stage": 0.98, "facts": 0.97, "chains": 0.97},
        0.63,
        300,
        (),
        (512, 256),
        True,
    ),
    Stage(
        2048,
        {"kv": 0.99, "two_stage": 0.99, "facts": 0.99, "chains": 0.99},
        0.8,
        300,
        (),
        (1024, 512),
        True,
    ),
    Stage(4096, {}, 1.0, 0, (), (2048, 1024), True),
)


TUNING = (  # from a model that retrieves already (--init)
    Stage(256, {}, 0.2, 0, (), (128,), True),
    Stage(512, {}, 0.4, 0, (), (256,), True),
    Stage(1024, {}, 0.7, 0, (), (512, 256), True),
    Stage(2048, {}, 1.0, 0, (), (1024, 512, 256), True),
)


@dataclass(frozen=True)
class Profile:
    """tokens: per step in stages of full batches, and at most `part` of them at once. minutes: the
    default wall budget. workers: processes that make rows ahead.
    """

    device: str
    processes: int
    tokens: int
    part: int
    minutes: float
    workers: int


PROFILES = {
    "cpu": Profile("cpu", 2, 4096, 2048, 70.0, 0),
    "gpu": Profile("cuda", 1, 32768, 32768, 8.0, 12),
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_pocket", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--profile", choices=PROFILES, default="cpu")
    parser.add_argument(
        "--minutes",
        type=float,
        help="wall-clock budget of the whole run (default: 70 on cpu, 8 on gpu)",
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        help="stop (resumably) after so many minutes; the schedule stays that of --minutes",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pocket-out"),
        help="checkpoint and exported model; an existing one is resumed",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01, help="Muon's peak learning rate")
    parser.add_argument(
        "--adam-lr",
        type=float,
        default=3e-3,
        help="AdamW's peak learning rate (embeddings and norms)",
    )
    parser.add_argument(
        "--init",
        type=Path,
        help="folder of a model of this architecture to go on from, instead of from scratch",
    )
    parser.add_argument(
        "--processes",
        type=int,
        choices=(1, 2),
        help="on a CPU (default 2; 1 where others keep the machine busy)",
    )
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def processes(args: argparse.Namespace) -> int:
    """How many training processes there are: one on a GPU."""
    return 1 if args.profile == "gpu" else args.processes or PROFILES[args.profile].processes


class Run:
    """Everything of one process: model, optimizers, stage, statistics."""

    def __init__(self, args: argparse.Namespace, rank: int):
        self.args, self.rank, self.profile = args, rank, PROFILES[args.profile]
        self.world, self.device = processes(args), self.profile.device
        self.minutes = args.minutes or self.profile.minutes
        self.stages = TUNING if args.init else STAGES
        if args.init:
            self.tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
            self.model = pocket_model.load(args.init)
        else:
            self.tokenizer = train_tokenizer()
            size = self.tokenizer.get_vocab_size()
            self.model = pocket_model.Pocket(pocket_model.Shape(vocab=size))
            pocket_model.structured_start(
                self.model, [self.tokenizer.decode([i]) for i in range(size)], args.seed
            )
        self.maker = pocket_data.RowMaker(self.tokenizer)
        self.model.to(self.device)
        dtype = self.model.dtype = pocket_model.compute_dtype(self.device)
        self.muon = Muon(
            self.model.matrices(), lr=args.lr, dtype=dtype, rank=rank, world=self.world
        )
        self.adam = torch.optim.AdamW(
            self.model.others(), lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.step, self.stage, self.stage_start, self.elapsed, self.tokens = 0, 0, 0, 0.0, 0
        self.recent: dict[str, deque] = defaultdict(lambda: deque(maxlen=WINDOW))
        self.counts = torch.zeros(len(KINDS) * 2 + 3)
        self.pool = (
            ProcessPoolExecutor(self.profile.workers, initializer=_start_worker)
            if self.profile.workers
            else None
        )
        self.ahead: dict = {}

    def step_tokens(self) -> int:
        """Tokens of a step: all of the profile's, or half of them in stages that take more and
        smaller steps.
        """
        return self.profile.tokens // (
            2 if self.stages[self.stage].halved and self.profile.processes > 1 else 1
        )

    def shards(self) -> int:
        """A step's rows come in so many parts, which the processes share out. Which rows there are
        does not depend on it.
        """
        return max(self.world, self.step_tokens() // self.profile.part)

    def length_of(self, step: int) -> int:
        """The row length of a step: the stage's, or one of its shorter ones in 40% of the steps."""
        stage = self.stages[self.stage]
        rng = pocket_data.row_random(self.args.seed, step, -1)
        return rng.choice(stage.mixed) if stage.mixed and rng.random() < 0.4 else stage.length

    def request(self, step: int, shard: int) -> tuple:
        """What `pocket_data.batch` needs for one shard of a step."""
        length = self.length_of(step)
        rows = max(1, self.step_tokens() // self.shards() // length)
        stretch = 0.0 if length < 128 else 0.4
        return self.args.seed, step, shard * rows, rows, length, stretch, 32768

    def data(self, shard: int):
        """One shard of the present step; with workers the next steps' are made meanwhile."""
        want = self.request(self.step, shard)
        if self.pool is None:
            return pocket_data.batch(self.maker, *want)
        for step in range(self.step, self.step + 2 * self.profile.workers):
            asked = self.request(step, shard)
            if asked not in self.ahead:
                self.ahead[asked] = self.pool.submit(_work, asked)
        self.ahead = {k: v for k, v in self.ahead.items() if k[1] >= self.step}
        return self.ahead.pop(want).result()

    def loss(self, shard: int) -> None:
        """One shard's answer loss plus a tenth of the loss on some document tokens; fills the
        gradients and the statistics.
        """
        ids, where, kinds, spans = self.data(shard)
        ids, where, kinds = ids.to(self.device), where.to(self.device), kinds.to(self.device)
        states = self.model.hidden(ids[:, :-1].contiguous(), where)
        gen = torch.Generator().manual_seed(self.step * 2 + shard)
        some = (torch.rand(kinds.shape, generator=gen) < 0.15).to(self.device)
        answer, document = kinds == 2, (kinds == 1) & some
        picked = (answer | document).flatten().nonzero().squeeze(1)
        target = ids[:, 1:].flatten()[picked]
        logits = self.model.logits(states.flatten(0, 1)[picked])
        each = F.cross_entropy(logits, target, reduction="none")
        weight = answer.flatten()[picked].float()
        answer_loss = (each * weight).sum() / weight.sum().clamp(min=1)
        document_loss = (each * (1 - weight)).sum() / (1 - weight).sum().clamp(min=1)
        ((answer_loss + 0.1 * document_loss) / self.shards()).backward()
        with torch.no_grad():
            right = torch.ones(kinds.numel(), device=self.device)
            right[picked] = (logits.argmax(-1) == target).float()
            self.tally(right.view(kinds.shape).cpu(), spans, float(answer_loss))

    def tally(self, right: torch.Tensor, spans, loss: float) -> None:
        """Count whole answers that greedy decoding would get right given the right prefix; fresh
        data, so this is held-out accuracy.
        """
        table = right.numpy()
        for row, task, start, stop in spans:
            index = KINDS.index(task)
            self.counts[2 * index] += float(table[row, start:stop].all())
            self.counts[2 * index + 1] += 1
        self.counts[-2] += loss
        self.counts[-1] += 1

    def share_gradients(self) -> None:
        """The gradient summed over all processes, and the clock of the first one."""
        grads = [p.grad for p in self.model.parameters()]
        if self.world > 1:
            flat = torch.cat(
                [g.flatten() for g in grads]
                + [torch.tensor([self.elapsed if self.rank == 0 else 0.0])]
            )
            dist.all_reduce(flat)
            self.elapsed = float(flat[-1])
            for grad, part in zip(grads, flat[:-1].split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def rates(self) -> float:
        """The learning rates' factor: a warm-up of 100 steps, then flat, then a linear fall to 3%
        over the last 85% of the time.
        """
        used = self.elapsed / (self.minutes * 60)
        return min(1.0, (self.step + 1) / 100) * min(1.0, max(0.03, (1 - used) / 0.85))

    def advance(self) -> None:
        """One optimizer step."""
        for shard in range(self.rank, self.shards(), self.world):
            self.loss(shard)
        length = self.length_of(self.step)
        self.tokens += (
            self.shards() * max(1, self.step_tokens() // self.shards() // length) * length
        )
        self.share_gradients()  # also makes the clock, and so the rates, the same everywhere
        factor = self.rates()
        self.muon.param_groups[0]["lr"] = self.args.lr * factor
        self.adam.param_groups[0]["lr"] = self.args.adam_lr * factor
        self.muon.step()
        self.adam.step()
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)
        self.step += 1

    def report(self) -> dict[str, float]:
        """Every LOG_STEPS steps: pool the counts of all processes, print a line, return accuracies
        over the window.
        """
        if self.world > 1:
            dist.all_reduce(self.counts)
        for index, kind in enumerate(KINDS):
            self.recent[kind].append(
                (float(self.counts[2 * index]), float(self.counts[2 * index + 1]))
            )
        loss = float(self.counts[-2] / self.counts[-1])
        self.counts.zero_()
        accuracy = {}
        for kind, values in self.recent.items():
            asked = sum(n for _, n in values)
            if asked:
                accuracy[kind] = sum(r for r, _ in values) / asked
        if self.rank == 0:
            left = max(0.0, self.minutes * 60 - self.elapsed)
            shown = " ".join(f"{k}={v:.2f}" for k, v in accuracy.items())
            print(
                f"step {self.step} L={self.stages[self.stage].length} loss {loss:.3f} {self.tokens / 1e6:.2f}Mtok "
                f"{self.elapsed / 60:.1f}min "
                f"left {left / 60:.1f}min lr x{self.rates():.2f} | {shown}",
                flush=True,
            )
        return accuracy

    def next_stage(self, accuracy: dict[str, float]) -> bool:
        """Move on when the stage is done. False when a go/no-go check failed."""
        stage, used = self.stages[self.stage], self.step - self.stage_start
        for steps, kind, least in stage.check:
            if steps <= used < steps + LOG_STEPS and accuracy.get(kind, 0.0) < least:
                if self.rank == 0:
                    print(
                        f"hopeless: {kind} is {accuracy.get(kind, 0.0):.2f} after {used} steps at {stage.length} "
                        f"tokens, {least} was due",
                        flush=True,
                    )
                return False
        met = (
            used >= stage.least
            and stage.goal
            and all(accuracy.get(k, 0.0) >= v for k, v in stage.goal.items())
        )
        late = self.elapsed > stage.until * self.minutes * 60
        if (met or late) and self.stage + 1 < len(self.stages):
            self.stage, self.stage_start = self.stage + 1, self.step
            self.recent.clear()
            if self.rank == 0:
                print(
                    f"stage: rows of {self.stages[self.stage].length} tokens ({'goal met' if met else 'time share used'})",
                    flush=True,
                )
        return True

    def save(self) -> None:
        """State of the run and the exported model, by the first process; each file written beside
        and renamed.
        """
        if self.rank:
            return
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "seed": self.args.seed,
            "minutes": self.minutes,
            "recent": {k: list(v) for k, v in self.recent.items()},
            "counts": self.counts,
        }
        state |= {
            name: getattr(self, name)
            for name in ("step", "stage", "stage_start", "elapsed", "tokens")
        }
        torch.save(state, out / "run.pt.part")
        os.replace(out / "run.pt.part", out / "run.pt")
        pocket_model.export(self.model, out)
        save_tokenizer(self.tokenizer, out)

    def resume(self) -> None:
        """Go on from the checkpoint in --out, if there is one."""
        path = self.args.out / "run.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if (state["seed"], state["minutes"]) != (self.args.seed, self.minutes):
            sys.exit(
                f"{path} belongs to a run with --seed {state['seed']} --minutes {state['minutes']}: "
                "use those, or another --out"
            )
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        for name in ("step", "stage", "stage_start", "elapsed", "tokens"):
            setattr(self, name, state[name])
        self.recent.update({k: deque(v, maxlen=WINDOW) for k, v in state["recent"].items()})
        self.counts = state["counts"] if self.rank == 0 else self.counts
        if self.rank == 0:
            print(f"resumed at step {self.step}, {self.elapsed / 60:.1f} minutes in", flush=True)

    def train(self) -> bool:
        """The whole run. True when it reached its end (or --stop-after)."""
        budget, stop = self.minutes * 60, (self.args.stop_after or math.inf) * 60
        base, saved = time.monotonic() - self.elapsed, time.monotonic()
        while self.elapsed < min(budget, stop):
            if self.rank == 0:
                self.elapsed = time.monotonic() - base
            self.advance()
            if self.step % LOG_STEPS == 0 and not self.next_stage(self.report()):
                return False
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()
        return True


_MAKER = None


def _start_worker() -> None:
    global _MAKER  # noqa: PLW0603 - a worker process holds one tokenizer for its whole life
    torch.set_num_threads(1)
    _MAKER = pocket_data.RowMaker(train_tokenizer())


def _work(asked: tuple):
    return pocket_data.batch(_MAKER, *asked)


def process(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One training process."""
    profile = PROFILES[args.profile]
    torch.set_num_threads(1)
    if processes(args) > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes(args))
    if not args.no_compile:
        torch._dynamo.config.recompile_limit = 64
        for name in ("before", "after", "plain_attention"):
            setattr(pocket_model, name, torch.compile(getattr(pocket_model, name), dynamic=False))
    run = Run(args, rank)
    if rank == 0:
        count = sum(p.numel() for p in run.model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, vocabulary {run.model.shape.vocab}, {run.world} process(es) "
            f"on {profile.device}, {str(run.model.dtype)[6:]}, "
            f"torch {torch.__version__}, seed {args.seed}, budget {run.minutes:g} min",
            flush=True,
        )
    run.resume()
    try:
        good = run.train()
    except KeyboardInterrupt:
        sys.exit(130)
    if run.world > 1:
        dist.destroy_process_group()
    if not good:
        sys.exit(3)


def main() -> None:
    """Start the processes of the profile and wait for them."""
    args = arguments()
    if args.profile == "gpu" and not torch.cuda.is_available():
        sys.exit("--profile gpu needs a CUDA device; use --profile cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    meeting = args.out / f"meeting-{os.getpid()}"
    os.environ.setdefault(
        "MALLOC_MMAP_MAX_", "0"
    )  # the allocator keeps its pages: a tenth of a step otherwise goes to page faults
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "100000000000")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torch.multiprocessing.spawn(
            process, (args, f"file://{meeting.resolve()}"), nprocs=processes(args)
        )
    except torch.multiprocessing.ProcessExitedException as ended:
        if ended.exit_code == 3:  # hopeless, and said so
            sys.exit(3)
        print(
            f"stopped (exit status {ended.exit_code}): the same command goes on from {args.out}/run.pt",
            file=sys.stderr,
        )
        sys.exit(130 if ended.exit_code == 130 else 1)
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from {args.out}/run.pt", file=sys.stderr)
        sys.exit(130)
    finally:
        meeting.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
