"""A random test of sessions against an oracle: a fresh session that replays what should be there.

    python -m tests.programs.attack --minutes 10 --seed 1        until the time is over
    python -m tests.programs.attack --seed 1234 --sequences 1    one sequence again

A sequence is a list of operations, each a name and a seed, so that a failing one can be shrunk:
operations are left out while it still fails. Interrupts are raised at a counted line of the engine,
so that they come at any moment and come back at the same one.
"""
