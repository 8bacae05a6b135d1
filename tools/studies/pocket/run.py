"""A training run of the shipped model: steps, statistics, stages, checkpoints."""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from collections import defaultdict, deque
from concurrent.futures import Future, ProcessPoolExecutor

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.nn import functional as F

from tools.studies.pocket import selector
from tools.studies.pocket.checkpoint import export, load
from tools.studies.pocket.data import Batch, RowMaker, Spans, batch, row_random
from tools.studies.pocket.model import Chooser, Pocket, Shape, compute_dtype
from tools.studies.pocket.optim import Muon
from tools.studies.pocket.schedule import PROFILES, STAGES, TUNING
from tools.studies.pocket.start import structured_start
from tools.studies.pocket.tokenizer import USER, save_tokenizer, train_tokenizer
from tools.tasks import TASKS

KINDS = ("recall", "copy", "arithmetic", "delayed", "refuse", *sorted(TASKS))
# accuracy is judged over the last WINDOW x LOG_STEPS steps
SAVE_SECONDS, LOG_STEPS, WINDOW = 100, 20, 4
CHOSEN_UNTIL = 2048  # tokens of a row, of which every second step sees what was chosen


def processes(args: argparse.Namespace) -> int:
    """How many training processes there are: one on a GPU."""
    return 1 if args.profile == "gpu" else args.processes or PROFILES[args.profile].processes


class Run:
    """One training process: model, optimizers, stage, statistics. args:
    tools/studies/pocket/train.py.
    """

    def __init__(self, args: argparse.Namespace, rank: int):
        self.args, self.rank, self.profile = args, rank, PROFILES[args.profile]
        self.world, self.device = processes(args), self.profile.device
        self.minutes = args.minutes or self.profile.minutes
        self.stages = TUNING if args.init else STAGES
        if args.init:
            self.tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
            self.model = load(args.init)
        else:
            self.tokenizer = train_tokenizer()
            size = self.tokenizer.get_vocab_size()
            self.model = Pocket(Shape(vocab=size))
            spelled = [self.tokenizer.decode([i]) for i in range(size)]
            structured_start(self.model, spelled, args.seed)
        self.maker = RowMaker(self.tokenizer)
        self.model.to(self.device)
        self.held = selector.Held(self.model)
        dtype = self.model.dtype = compute_dtype(self.device)
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
        self.ahead: dict[tuple, Future] = {}

    def step_tokens(self) -> int:
        """Tokens of a step: all of the profile's, or half of them in stages that take more and
        smaller steps.
        """
        return self.profile.tokens // (
            2 if self.stages[self.stage].halved and self.profile.processes > 1 else 1
        )

    def shards(self) -> int:
        """Parts of a step, which the processes share out. The step's rows do not depend on their
        number.
        """
        return max(self.world, self.step_tokens() // self.profile.part)

    def length_of(self, step: int) -> int:
        """The row length of a step: the stage's, or one of its shorter ones in 40% of the steps."""
        stage = self.stages[self.stage]
        rng = row_random(self.args.seed, step, -1)
        return rng.choice(stage.mixed) if stage.mixed and rng.random() < 0.4 else stage.length

    def request(self, step: int, shard: int) -> tuple:
        """The arguments of `tools.studies.pocket.data.batch` for one shard of a step."""
        length = self.length_of(step)
        rows = max(1, self.step_tokens() // self.shards() // length)
        stretch = 0.0 if length < 128 else 0.4
        return self.args.seed, step, shard * rows, rows, length, stretch, 32768

    def data(self, shard: int) -> Batch:
        """One shard of this step; workers make the next steps' meanwhile."""
        want = self.request(self.step, shard)
        if self.pool is None:
            return batch(self.maker, *want)
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
        tokens = ids[:, :-1].contiguous()
        states = self.model.hidden(tokens, where, self.chooser(tokens, kinds))
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

    def chooser(self, tokens: torch.Tensor, kinds: torch.Tensor) -> tuple[int, Chooser] | None:
        """Every second step the rows from a dialogue's first question on (without one: that
        answer) see what the selector chose; None in the others.

        So what they look up is found where full attention and OmniKV both have it.
        """
        if self.step % 2 or tokens.shape[1] > CHOSEN_UNTIL or self.model.embed.is_cuda:
            return None
        asked = ((tokens == USER) | (kinds == 2)).cummax(1).values
        return selector.LAYER, functools.partial(selector.chosen, answers=asked)

    def tally(self, right: torch.Tensor, spans: Spans, loss: float) -> None:
        """Count the answers that greedy decoding would get right given the right prefix. The data
        is fresh, so this is held-out accuracy.
        """
        table = right.numpy()
        for row, task, start, stop in spans:
            index = KINDS.index(task)
            self.counts[2 * index] += float(table[row, start:stop].all())
            self.counts[2 * index + 1] += 1
        self.counts[-2] += loss
        self.counts[-1] += 1

    def share_gradients(self) -> None:
        """Sum the gradients over all processes, and take over the first process's clock."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.world > 1:
            flat = torch.cat(
                [g.flatten() for g in grads]
                + [torch.tensor([self.elapsed if self.rank == 0 else 0.0])]
            )
            dist.all_reduce(flat)
            self.elapsed = float(flat[-1])
            for grad, part in zip(grads, flat[:-1].split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self.held.drop_gradients()
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
        self.held.restore()
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
                f"step {self.step} L={self.stages[self.stage].length} loss {loss:.3f} "
                f"{self.tokens / 1e6:.2f}Mtok {self.elapsed / 60:.1f}min "
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
                        f"hopeless: {kind} is {accuracy.get(kind, 0.0):.2f} after {used} steps "
                        f"at {stage.length} tokens, {least} was due",
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
                why = "goal met" if met else "time share used"
                length = self.stages[self.stage].length
                print(f"stage: rows of {length} tokens ({why})", flush=True)
        return True

    def save(self) -> None:
        """Write the state of the run and the exported model (the first process only), each file
        beside its place and renamed.
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
        export(self.model, out)
        save_tokenizer(self.tokenizer, out)

    def resume(self) -> None:
        """Go on from the checkpoint in --out, if there is one."""
        path = self.args.out / "run.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if (state["seed"], state["minutes"]) != (self.args.seed, self.minutes):
            sys.exit(
                f"{path} belongs to a run with --seed {state['seed']} "
                f"--minutes {state['minutes']}: "
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


@functools.cache
def _maker() -> RowMaker:
    """A worker's maker of rows, made once."""
    return RowMaker(train_tokenizer())


def _start_worker() -> None:
    torch.set_num_threads(1)
    _maker()


def _work(asked: tuple) -> Batch:
    return batch(_maker(), *asked)
