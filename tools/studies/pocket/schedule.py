"""The stages of a training run and the machines it runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage of rows of `length` tokens.

    It ends when `goal` (kind -> accuracy) is met after `least` steps, or when the share `until` of
    the run's time is gone. check: (steps, kind, accuracy) that must be reached by then, else the
    run stops as hopeless. mixed: lengths of shorter rows that 40% of the steps take. halved: steps
    of half the tokens on two processes.
    """

    length: int
    goal: dict[str, float]
    until: float
    least: int = 100
    check: tuple[tuple[int, str, float], ...] = ()
    mixed: tuple[int, ...] = ()
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


# from a model that retrieves already (--init)
TUNING = (
    Stage(256, {}, 0.2, 0, (), (128,), True),
    Stage(512, {}, 0.4, 0, (), (256,), True),
    Stage(1024, {}, 0.7, 0, (), (512, 256), True),
    Stage(2048, {}, 1.0, 0, (), (1024, 512, 256), True),
)


@dataclass(frozen=True)
class Profile:
    """A machine's settings. processes: that train; tokens: of a step in stages of full batches, at
    most `part` of them at once; minutes: the default budget; workers: processes that make rows
    ahead.
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
