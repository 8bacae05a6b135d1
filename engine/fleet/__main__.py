"""python -m engine.fleet: replicas of a model on this machine, or on the Ray cluster that
RAY_ADDRESS names, until a signal.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence

from engine.base.errors import EngineError, SettingError, UsageError
from engine.cli.settings import flag_named
from engine.serve.cli import open_model, slots_of
from engine.serve.flags import parser


class RayFailed(EngineError):
    """Ray did not start, or could not run the replicas."""


def own_flags(add: Callable[..., object]) -> None:
    """Those that say how many run, and where a request goes."""
    add("--replicas", default="1", metavar="N", help="how many, or auto: as Ray sees fit (1)")
    add("--replica-cpus", default="1", metavar="N", help="by which Ray places a replica (1)")
    add("--replica-gpus", default="0", metavar="N", help="the same (0); as many as --gpus takes")
    add("--ongoing", metavar="N", help="requests at once of a replica (twice its slots)")
    add(
        "--router",
        default="prefix",
        help="prefix: to who has read the beginning of the text (default); load: to who has least "
        "to do; or the import path of a RequestRouter of Ray's",
    )


def run(argv: Sequence[str]) -> int:
    """Start the replicas and wait; the exit code. Raises EngineError."""
    every = parser()
    every.prog = "python -m engine.fleet"
    own_flags(every.add_argument)
    args = every.parse_args(argv)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own_flags(own.add_argument)
    mine, flags = own.parse_known_args(argv)
    try:
        import ray
        from ray import serve

        from engine.fleet.ray_serve import application
    except ImportError as error:
        raise SettingError(f"replicas need {error.name}: pip install 'ray[serve]'") from None
    found = {name.removeprefix("replica_"): value for name, value in vars(mine).items()}
    given = {name: value for name, value in found.items() if value is not None}
    app = application({"flags": shlex.join(flags), **given})
    slots_of(args, open_model(args)).require_fit()  # said here, not by every replica
    try:
        ray.init(include_dashboard=False)
        _require_room(mine, ray.cluster_resources())
        serve.start(http_options={"host": args.host, "port": args.port})
        serve.run(app, name="omnikv")
        ended: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has set its own meanwhile
            signal.signal(number, lambda sig, frame: ended.append(sig))
        print(f"replicas are ready: http://{args.host}:{args.port}/v1", file=sys.stderr, flush=True)
        while not ended:
            time.sleep(0.2)
        print("stopping", file=sys.stderr, flush=True)
    except EngineError:
        raise
    except Exception as error:  # Ray has no kind of its own for what goes wrong at its start
        said = str(error).strip() or type(error).__name__
        raise RayFailed(f"Ray: {said.splitlines()[0]}; its log says more") from error
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def _require_room(mine: argparse.Namespace, found: dict[str, float]) -> None:
    """Raise UsageError where Ray would wait for ever for a place for a replica."""
    if mine.replicas == "auto" or os.environ.get("RAY_ADDRESS"):
        return
    for flag, each, name in (
        ("--replica-cpus", mine.replica_cpus, "CPU"),
        ("--replica-gpus", mine.replica_gpus, "GPU"),
    ):
        needed, here = float(mine.replicas) * float(each), found.get(name, 0.0)
        if needed > here:
            raise UsageError(
                f"--replicas {mine.replicas} {flag} {each}: expected at most "
                f"{here:g} in all, what Ray finds here; take fewer, or fractions such as 0.5"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except EngineError as error:
        message = str(error)
        message = flag_named(message, []) if isinstance(error, SettingError) else message
        print(f"error: {message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
