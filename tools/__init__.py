"""Programs that a person runs, and what they share.

Programs, each `python -m tools.NAME --help`:
    bench             time per token of every method and of other engines, by context
    compare           accuracy, bytes and time of every method on one model
    eval              accuracy of full attention and OmniKV over the tasks
    check_gpu         one call that says what a GPU does with the engine
    compile_kernels   compile the Triton kernels without a GPU
    calibrate         find a model's filter layers (omnikv.json)
    pod_groups        find the layers that may share attention (pod.json)
    minference_search find MInference's pattern of every head
    prefill_table     time, ETA and memory of sparse prefill
    prefill_quality   accuracy of sparse prefill
    block_recall      recall of the block estimators of sparse prefill
    reuse             how many selected tokens were selected a step before
    sources           the page of a recorded answer
    train_pocket      train the shipped model
    pocket_filters    find the shipped model's filter layers by brute force
    answers           record what a fixed set of runs answers
    api_page          write docs/API.md from signatures and docstrings
    house             the shape of the code: modules, import arrows, lengths, types

Shared: tasks (documents, questions and exact answers), pocket (the shipped model's training),
program (exit codes, errors, files), synthetic_bank and planted_selection (long contexts that nobody
read, for timing).
"""

from engine.early_interrupt import leave_quietly

leave_quietly("tools")

import kernels.openmp  # noqa: E402, F401  before torch: says how its threads wait
