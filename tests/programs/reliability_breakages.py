"""Would the tests of docs/RELIABILITY.md have failed? Takes back one mend at a time, as
tests/programs/breakages.py does with its own table.

    python -m tests.programs.reliability_breakages [--only WORDS ...] [--match]
"""

from __future__ import annotations

import sys

from tests.programs.breakages import Breakage, main

WHOLE = "tests/engine/session/test_whole_sessions.py"
SURVIVAL = "tests/engine/chat/test_survival.py"
CONFINED = "tests/engine/text/test_confined.py"
GROWTH = "tests/engine/text/test_growth.py"
LITERAL = "tests/engine/text/test_literal.py"
LIMITS = "tests/engine/plan/test_memory_limits.py"
RESULTS = "tests/tools/test_results.py"
FAULTS = "tests/engine/bank/test_offload_faults.py"
NUMBERS = "tests/engine/base/test_numbers.py"
LOOKS = "test_a_run_looks_at_its_places_before_it_loads_and_at_its_numbers_before_it_measures"

STATE = (
    Breakage(
        "H1 a switch after a truncate looks at queries that are gone",
        "engine/runner/prompt.py",
        r"have_queries\(session, runner, needs\.prompt_window\)",
        "pass",
        (f"{WHOLE}::test_a_switch_after_a_truncate_knows_the_queries",),
    ),
    Breakage(
        "H4 sums keep the room of an interrupted reading",
        "engine/methods/evict/shared/accumulated_scores.py",
        r"sums\[:, :, :known\] = before\[:, :, :known\]",
        "sums[:, :, : before.shape[2]] = before",
        (f"{WHOLE}::test_h2o_reads_on_after_an_interrupted_reading",),
    ),
    Breakage(
        "M2 a fork forgets its capacity",
        "engine/session/switch.py",
        r"None if session\.endless else session\.capacity",
        "None",
        (f"{WHOLE}::test_a_fork_keeps_capacity_backend_and_watch",),
    ),
    Breakage(
        "M2 a fork forgets its backend",
        "engine/session/switch.py",
        r"if copy\.backend != session\.backend:",
        "if False:",
        (f"{WHOLE}::test_a_fork_keeps_capacity_backend_and_watch",),
    ),
    Breakage(
        "M2 a fork forgets its watch",
        "engine/runner/state.py",
        r"None if other\.watch is None else replace\(other\.watch\)",
        "None",
        (f"{WHOLE}::test_a_fork_keeps_capacity_backend_and_watch",),
    ),
    Breakage(
        "M4 a check leaves its rows",
        "engine/base/interrupts.py",
        r"complete\(restore\)",
        "pass",
        (f"{WHOLE}::test_a_check_after_a_switch_changes_nothing",),
    ),
    Breakage(
        "M4 a check leaves its queries and choices",
        "engine/session/check.py",
        r"complete\(restore\)",
        "pass",
        (f"{WHOLE}::test_a_check_after_a_switch_changes_nothing",),
    ),
    Breakage(
        "M5 going back below a switch reads everything again",
        "engine/runner/rewind.py",
        r"if cut is not None and cut\.switched and not lost:\n( +_switch_again)",
        r"if False:\n\1",
        (f"{WHOLE}::test_going_back_below_a_switch_reads_nothing_again",),
    ),
    Breakage(
        "M5 what runs again is not foretold",
        "engine/runner/rewind.py",
        r"return n if needs\.every_query or rows_lost\(session, needs, n\) else 0",
        "return 0",
        (f"{WHOLE}::test_going_back_below_a_switch_foretells_the_queries_that_run_again",),
    ),
    Breakage(
        "M8 an answer belongs to the thread of its first piece",
        "engine/base/lock.py",
        r"if not nested and \(request is None or request not in lock\._answers\):",
        "if not nested:",
        (f"{WHOLE}::test_an_answer_may_change_threads_and_others_are_refused",),
    ),
    Breakage(
        "M9 a fork forgets the prompt that was to go on",
        "engine/methods/evict/shared/runtime.py",
        r"self\.reading, self\.total = other\.reading, other\.total",
        "pass",
        (f"{WHOLE}::test_an_open_prompt_survives_forks_and_truncates",),
    ),
    Breakage(
        "M9 a truncate forgets where the open prompt began",
        "engine/methods/evict/shared/runtime.py",
        r"found = Sequence\(at, since, prompt,",
        "found = Sequence(at, at, prompt,",
        (f"{WHOLE}::test_an_open_prompt_survives_forks_and_truncates",),
    ),
    Breakage(
        "M10 a switch changes the session before it is made",
        "engine/session/switch.py",
        r"( +)points = switched\(session, runner, progress\)",
        r"\1session.go_on(runner, session.history.savepoints)\n"
        r"\1points = switched(session, runner, progress)",
        (f"{WHOLE}::test_a_switch_that_is_interrupted_leaves_the_session_as_it_was",),
    ),
    Breakage(
        "M10 an interrupted truncate is forgotten",
        "engine/runner/rewind.py",
        r"history\.postpone\(replace\(pending, inconsistent=False\)\)",
        "history.postpone(None)",
        (f"{WHOLE}::test_a_truncate_that_is_interrupted_is_done_by_the_next_call",),
    ),
    Breakage(
        "L11 logits after a truncate are full attention's",
        "engine/runner/rewind.py",
        r"if n > history\.prompt_length and session\.runner\.kind\(n\)\.own:",
        "if False:",
        (f"{WHOLE}::test_logits_after_a_truncate_are_those_of_the_methods_own_step",),
    ),
    Breakage(
        "queries that full attention does not compute again are not kept",
        "engine/runner/prompt.py",
        r"ring\.keep\(\)",
        "pass",
        (f"{WHOLE}::test_queries_that_only_the_prompts_own_method_computes_come_back",),
    ),
)

CHAT = (
    Breakage(
        "H2 Ctrl-C in a command is not the chat's",
        "engine/chat/repl.py",
        r"with chat\.interrupts\.at_once\(\):",
        "if True:",
        (f"{SURVIVAL}::test_one_ctrl_c_stops_a_command_and_two_leave",),
    ),
    Breakage(
        "H3 only typed errors are caught",
        "engine/chat/repl.py",
        r"except Exception as error:  # whatever",
        "except EngineError as error:  # whatever",
        (f"{SURVIVAL}::test_any_exception_in_a_command_is_one_line_and_the_conversation_goes_on",),
    ),
    Breakage(
        "H3 a document may be of any kind",
        "engine/terminal/documents.py",
        r"if not stat\.S_ISREG\(found\.st_mode\):",
        "if False:",
        (f"{SURVIVAL}::test_what_is_no_file_of_bounded_size_is_refused_at_once",),
    ),
    Breakage(
        "M6 what is shown holds control characters",
        "engine/text/boundary.py",
        r"return CONTROLS\.sub\(REPLACEMENT, text\)",
        "return text",
        (f"{SURVIVAL}::test_passages_on_the_screen_hold_no_escape_sequences",),
    ),
    Breakage(
        "M11 a last backslash drops the message",
        "engine/chat/repl.py",
        r'return "\\n"\.join\(\[\*lines\[:-1\], line\]\)',
        "raise",
        (f"{SURVIVAL}::test_the_end_of_input_drops_no_message",),
    ),
    Breakage(
        "M11 an open quotation drops the message",
        "engine/chat/repl.py",
        r"raise UsageError\(\n +'message: found the end of input[^)]*\) from None",
        "raise",
        (f"{SURVIVAL}::test_the_end_of_input_drops_no_message",),
    ),
    Breakage(
        "L3 text may be no Unicode",
        "engine/text/boundary.py",
        r'        text\.encode\("utf-8"\)',
        "        pass",
        (f"{GROWTH}::test_half_a_surrogate_pair_is_refused_by_name",),
    ),
    Breakage(
        "control tokens of a message are not marked",
        "engine/text/literal.py",
        r"if not any\(self\.every\.search\(text\) for text in texts\):",
        "if True:",
        (f"{LITERAL}::test_a_document_forges_no_turn_and_nothing_is_read_twice",),
    ),
)

FILES = (
    Breakage(
        "M7 a tokenizer may grow a text without bounds",
        "engine/text/sandbox/growth.py",
        r"if growth > MOST_GROWTH:",
        "if False:",
        (f"{GROWTH}::test_what_could_grow_without_bounds_is_refused_before_the_library_sees_it",),
    ),
    Breakage(
        "M7 a panic of the library is no error",
        "engine/text/tokenizer.py",
        r'if type\(error\)\.__name__ != "PanicException":',
        "if True:",
        (f"{GROWTH}::test_an_expression_without_end_that_no_trial_finds_is_one_typed_error",),
    ),
    Breakage(
        "M7 a file of a model folder may be a link out of it",
        "weights/jsonfile.py",
        r"if not any\(real\.is_relative_to\(allowed\) for allowed in roots\):",
        "if False:",
        (f"{GROWTH}::test_every_file_is_a_regular_one_inside_of_bounded_size_and_text",),
    ),
    Breakage(
        "M12 calibration does not look at its places first",
        "tools/calibrate/cli.py",
        r"    require_places\(args\)\n    llm",
        "    llm",
        (f"{RESULTS}::{LOOKS}",),
    ),
    Breakage(
        "M12 calibration does not look at its numbers",
        "tools/calibrate/cli.py",
        r"    require_numbers\(args, llm\.config\.num_layers\)",
        "    pass",
        (f"{RESULTS}::{LOOKS}",),
    ),
    Breakage(
        "M12 a result is written in its place",
        "tools/common/program.py",
        r"beside\.replace\(path\)",
        "path.write_text(text, encoding='utf-8')",
        (f"{RESULTS}::test_several_writers_leave_whole_files_to_every_reader",),
    ),
    Breakage(
        "L10 two comparisons share a folder",
        "tools/common/program.py",
        r"fcntl\.flock\(handle, fcntl\.LOCK_EX \| fcntl\.LOCK_NB\)",
        "pass",
        (f"{RESULTS}::test_one_run_per_folder",),
    ),
)

MEMORY = (
    Breakage(
        "M1 only the root's memory limit is seen",
        "engine/plan/free_memory.py",
        r"groups = control_groups\(process\) if folder is None else at_the_top\(folder\)",
        'groups = at_the_top(folder or Path("/sys/fs/cgroup"))',
        (f"{LIMITS}::test_version_2_in_a_group_below_the_mount",),
    ),
    Breakage(
        "M1 ulimit -v is not seen",
        "engine/plan/free_memory.py",
        r"if \(space := address_space_left\(\)\) is not None:",
        "if (space := None) is not None:",
        (f"{LIMITS}::test_an_address_space_limit_is_seen_before_anything_is_loaded",),
    ),
    Breakage(
        "M3 the block given back first is taken first",
        "engine/bank/pool/host_pool.py",
        r"return free\.pop\(\)",
        "return free.pop(0)",
        (f"{FAULTS}::test_the_block_given_back_last_is_taken_first_and_any_free_one_serves",),
    ),
    Breakage(
        "M3 no budget limits the pool on a CPU",
        "engine/load/planner.py",
        r'return None if limit is None else self\.plan\(offload="host"\)\.left_for_host\(limit\)',
        "return None",
        (f"{FAULTS}::test_ram_budget_limits_the_host_tier_on_a_cpu",),
    ),
    Breakage(
        "M13 the template process outlives its parent",
        "engine/text/sandbox/template_worker.py",
        r"prctl\(PR_SET_PDEATHSIG, signal\.SIGKILL, 0, 0, 0\)",
        "pass",
        (f"{CONFINED}::test_it_ends_with_a_parent_that_is_killed",),
    ),
    Breakage(
        "M13 the template process gets every variable",
        "engine/text/sandbox/template.py",
        r" if name\.upper\(\) in KEPT_VARIABLES",
        "",
        (f"{CONFINED}::test_secrets_stay_here",),
    ),
    Breakage(
        "M13 the template process starts others",
        "engine/text/sandbox/template_worker.py",
        r"        refuse_processes\(prctl\)",
        "        pass",
        (f"{CONFINED}::test_it_starts_no_process",),
    ),
    Breakage(
        "L2 a number may be too large",
        "engine/base/checks.py",
        r"\(MOST if most is None else most\)",
        "(float('inf') if most is None else most)",
        (f"{NUMBERS}::test_so_is_a_field_of_sampling_params",),
    ),
)  # fmt: skip

TABLE = STATE + CHAT + FILES + MEMORY

if __name__ == "__main__":
    sys.exit(main(table=TABLE))
