"""Do the tests of several sequences in one step notice? Breaks one line at a time, as
tests/programs/breakages.py does with its own table.

    python -m tests.programs.batch_breakages [--only WORDS ...] [--match]
"""

from __future__ import annotations

import sys

from tests.programs.breakages import Breakage, main

BATCH, GRAPHS = "tests/engine/batch/test_batch.py", "tests/engine/batch/test_batch_graphs.py"
ALONE = f"{BATCH}::test_a_sequence_says_what_it_says_alone[0]"

TABLE = (
    Breakage(
        "the queries of two sequences change places",
        "engine/forward/decode.py",
        r"in zip\(sequences, queries\):",
        "in zip(sequences, queries[::-1]):",
        (ALONE,),
    ),
    Breakage(
        "all sequences see the first one's rows and tail",
        "engine/forward/decode.py",
        r"attend\(number, q, step\)\)",
        "attend(number, q, steps[0]))",
        (ALONE,),
    ),
    Breakage(
        "a sequence takes another's token",
        "engine/forward/decode.py",
        r"\[sequence\.tokens for sequence in sequences\]",
        "[sequence.tokens for sequence in sequences[::-1]]",
        (ALONE,),
    ),
    Breakage(
        "every sequence is rotated to the first one's position",
        "engine/forward/decode.py",
        r"turn\[number\] for turn in turns",
        "turns[0][number] for turn in turns",
        (ALONE,),
    ),
    Breakage(
        "rows go to another's bank",
        "engine/forward/layer.py",
        r"zip\(steps, split_rows\(steps, \*found\)\)",
        "zip(steps[::-1], split_rows(steps, *found))",
        (ALONE,),
    ),
    Breakage(
        "logits go to another session",
        "engine/batch/stepping.py",
        r"in zip\(steps, logits\):",
        "in zip(steps, logits[::-1]):",
        (ALONE,),
    ),
    Breakage(
        "the bits of a product depend on who else is in it",
        "engine/runner/step_runner.py",
        r"torch_layer\(loaded.model, backend=backend\)",
        'torch_layer(loaded.model, backend="cpu")',
        (f"{BATCH}::test_the_weights_are_read_once",),
    ),
    Breakage(
        "an error of one is everybody's",
        "engine/batch/stepping.py",
        r"for step in steps:\n( +)_guarded\(step\.session, done, partial\(_prepared_again",
        r"raise\n                for step in steps:\n\1_guarded(step.session, done, "
        r"partial(_prepared_again",
        (f"{BATCH}::test_who_fails_fails_alone[attend]",),
    ),
    Breakage(
        "who was before its step at an interrupt is not fed any more",
        "engine/batch/batch.py",
        r"if not s\.closed and len\(s\) == feed\.length",
        "if False",
        (f"{BATCH}::test_an_interrupt_leaves_every_session_before_or_after_its_step",),
    ),
    Breakage(
        "a step that an interrupt followed is taken again",
        "engine/batch/scheduler.py",
        r"if len\(task\.session\) == task\.length \+ 1:\n +continue",
        "if False:\n                continue",
        (f"{BATCH}::test_an_interrupted_run_goes_on",),
    ),
    Breakage(
        "all that read advance between two steps",
        "engine/batch/scheduler.py",
        r"alone = next\(\((task for .* WaitForTurn\))\), None\)\n +if alone is not None:",
        r"for alone in list(\1):",
        (f"{BATCH}::test_nobody_waits_for_more_than_one_chunk",),
    ),
    Breakage(
        "the pause is forgotten",
        "engine/batch/chunking.py",
        r"if others and self\.pause is not None else",
        "if False else",
        (f"{BATCH}::test_chunks_follow_the_pause",),
    ),
    Breakage(
        "a metered step is shared, and measures nothing",
        "engine/runner/step.py",
        r"runner\.batchable and self\._watch is None",
        "runner.batchable",
        (f"{BATCH}::test_a_watched_session_is_measured_in_its_own_step",),
    ),
    Breakage(
        "every join is captured",
        "engine/batch/step.py",
        r"self\._seen < PATIENCE",
        "self._seen < 1",
        (f"{GRAPHS}::test_a_set_that_stays_is_captured_once_and_replays_what_is_fed",),
    ),
    Breakage(
        "a graph outlives its session",
        "engine/batch/batch.py",
        r"self\._stepping\.forget\(\{.*\)\n",
        "pass\n",
        (f"{GRAPHS}::test_a_set_that_stays_is_captured_once_and_replays_what_is_fed",),
    ),
    Breakage(
        "a bucket serves lengths beyond it",
        "engine/batch/step.py",
        r"bucket_for\(step\.n, ",
        "bucket_for(1, ",
        (f"{GRAPHS}::test_a_longer_bank_is_another_bucket",),
    ),
    Breakage(
        "a fused step stores every sequence's rows at the first one's position",
        "engine/forward/layer.py",
        r"rotate_store\(mine, c, s, k, v, ring, step\.positions",
        "rotate_store(mine, c, s, k, v, ring, steps[0].positions",
        ("tests/kernels/test_shared_step.py::test_a_fused_step_of_several",),
    ),
    Breakage(
        "the plan forgets what a slot costs beside its bank",
        "engine/load/batch_plan.py",
        r'SHARED = \("weights",',
        'SHARED = ("weights", "query ring",',
        ("tests/engine/plan/test_slots.py::test_each_slot_costs_what_a_session_holds[device]",),
    ),
)

if __name__ == "__main__":
    sys.exit(main(table=TABLE))
