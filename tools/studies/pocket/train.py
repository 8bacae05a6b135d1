"""Trains the model this project ships, from scratch: `python -m tools.studies.pocket.train
--minutes 70` on two CPU cores, `--profile gpu` on one GPU.

A run grows its rows from 64 to 4,096 tokens, stage by stage, by accuracy (or when a stage's share
of the time is used up), checks at each stage that retrieval took off, and saves everything it needs
to go on (`--out`) every 100 seconds: the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tools.common.arguments import command
from tools.common.program import say
from tools.studies.pocket import model as pocket_model
from tools.studies.pocket.run import Run, processes
from tools.studies.pocket.schedule import PROFILES


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command("python -m tools.studies.pocket.train", __doc__.splitlines()[0])
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


def process(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One training process."""
    profile = PROFILES[args.profile]
    # what torch sends when the parent has died; a shell's background jobs start with it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if processes(args) > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes(args))
    if not args.no_compile:
        torch._dynamo.config.recompile_limit = 64
        for name in ("pre_attention", "post_attention", "plain_attention"):
            setattr(pocket_model, name, torch.compile(getattr(pocket_model, name), dynamic=False))
    run = Run(args, rank)
    if rank == 0:
        count = sum(p.numel() for p in run.model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, vocabulary {run.model.shape.vocab}, "
            f"{run.world} process(es) on {profile.device}, {str(run.model.dtype)[6:]}, "
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
    meeting, state = args.out / f"meeting-{os.getpid()}", args.out / "run.pt"
    # the allocator keeps its pages: a tenth of a step otherwise goes to page faults
    os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "100000000000")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torch.multiprocessing.spawn(
            process, (args, f"file://{meeting.resolve()}"), nprocs=processes(args)
        )
    except torch.multiprocessing.ProcessExitedException as ended:
        if ended.exit_code == 3:  # hopeless, and said so
            sys.exit(3)
        say(f"stopped (exit status {ended.exit_code}); the same command goes on from {state}")
        sys.exit(130 if ended.exit_code == 130 else 1)
    except KeyboardInterrupt:
        say(f"stopped; the same command goes on from {state}")
        sys.exit(130)
    finally:
        meeting.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
