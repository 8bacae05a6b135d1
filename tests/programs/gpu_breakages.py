"""Would the tests have failed on the code before? Takes back what was mended without a GPU at hand,
one mend at a time, as tests/programs/breakages.py does with its own table. F1 to F18 are the
findings of the first desk check of which docs/LOG.md tells, C2 to L5 those of the second.

    python -m tests.programs.gpu_breakages [--only WORDS ...] [--match]
"""

from __future__ import annotations

import sys

from tests.programs.breakages import Breakage, main

CARD = "tests/engine/runner/test_current_device.py"
CHECK = "tests/tools/test_check_gpu.py"
CAPTURE = "tests/engine/forward/test_capture.py"
AHEAD = "tests/engine/sampling/test_runs_ahead.py"
FREE = "tests/engine/plan/test_free_memory.py"
PAST = "tests/kernels_cpu/test_prefill.py"
MERGED = "tests/kernels/test_merge_parts.py"
INTEGRATED = "tests/engine/plan/test_integrated_gpu.py"
TIMES = "tests/tools/test_gpu_times.py"
PACKED = "tests/kernels/test_rows_int8.py"
SELF = "tests/engine/forward/test_self_test.py"
COMPILED = "tests/aot/test_ahead.py"
SSD = "tests/kernels/test_ssd.py"

FINDINGS = (
    Breakage(
        "C8 a product's sums follow the number of rows",
        "kernels/layer/gemv.py",
        r"STEP=STEPS\[x\.itemsize\],",
        "STEP=STEPS[x.itemsize] // (1 if x.numel() == inputs else 2),",
        ("tests/kernels/test_step_kernels.py::test_a_rows_bits_do_not_depend_on_its_neighbours",),
    ),
    Breakage(
        "C8 a product's sums follow the number of rows, with weights of few bits",
        "kernels/quant/gemv.py",
        r"ALONG=ALONG,",
        "ALONG=ALONG // (1 if x.numel() == x.shape[-1] else 2),",
        ("tests/kernels/test_few_bits.py::test_a_rows_bits_do_not_depend_on_its_neighbours",),
    ),
    Breakage(
        "F1 nobody makes the LLM's card current",
        "engine/load/loaded.py",
        r"self\.lock\.held\(\), current\(self\.device\):",
        "self.lock.held():",
        (f"{CARD}::test_every_request_makes_the_llms_card_current",),
    ),
    Breakage(
        "F1 a wait holds back the stream of whatever card is current",
        "engine/bank/host/streams.py",
        r"current_stream\(device\)\.wait_event",
        "current_stream().wait_event",
        (f"{CARD}::test_a_wait_holds_back_the_stream_of_its_own_card",),
    ),
    Breakage(
        "F2 tokens per second are the time of a launch",
        "engine/base/device.py",
        r'self\._gpu = device\.type == "cuda"',
        "self._gpu = False",
        ("tests/engine/base/test_step_clock.py::test_an_answers_rate_is_the_devices",),
    ),
    Breakage(
        "F3a a capture lies inside the window in which memory is flat",
        "tools/gpu/sections.py",
        r"for token in fed:\n        session\.decode\(token\)",
        "for token in fed:\n        pass",
        (f"{CHECK}::test_the_graph_section_measures_after_every_capture",),
    ),
    Breakage(
        "F3b tokens of random weights must be equal without a tolerance",
        "tools/gpu/sections.py",
        r"ties \+= said != expected and .*",
        "ties += 0",
        (f"{CHECK}::test_captured_tokens_may_tie_within_rounding_and_no_further",),
    ),
    Breakage(
        "F3c CUDA tests that were stopped count as done",
        "tools/gpu/jobs.py",
        r'"summary": how, "error": how,',
        '"summary": how,',
        (f"{CHECK}::test_cuda_tests_that_are_stopped_are_run_again",),
    ),
    Breakage(
        "F3d every card has the milliseconds of an H200",
        "tools/gpu/verdict.py",
        r"scaled = limit and .*",
        "scaled = limit",
        (f"{CHECK}::test_limits_in_milliseconds_follow_the_cards_rate",),
    ),
    Breakage(
        "F5 the ring's rows are computed for every layer",
        "engine/bank/base.py",
        r"if known is None or known\[0\] is not tail_start:",
        "if True:",
        (
            "tests/engine/forward/test_launches.py"
            "::test_the_host_tier_adds_its_plans_and_its_gathers_and_four_kernels",
        ),
    ),
    Breakage(
        "F6 the past is read by the flash kernel on every card",
        "kernels/prefill/dense.py",
        r"while \(cudnn or packed\) and block >= CUDNN_BLOCK:",
        "while False:",
        (f"{PAST}::test_the_past_is_read_once_and_cudnn_sees_few_shapes",),
    ),
    Breakage(
        "F8 every token copies the host tier's counters from the device",
        "engine/session/generate.py",
        r"stats\.count\(session\.counters, start\)",
        "stats.count(session.stats, start)",
        (
            "tests/engine/forward/test_generate_reads.py"
            "::test_no_counter_is_read_from_the_device_while_an_answer_is_written",
        ),
    ),
    Breakage(
        "F9 a step that broke off leaves counts in the top-k's histogram",
        "engine/runner/rollback.py",
        r"session\.runtime\.clear_scratch\(\)",
        "pass",
        ("tests/kernels/test_broken_step.py::test_a_step_that_broke_off_leaves_no_counts",),
    ),
    Breakage(
        "F13 a draw waits for the device three times",
        "engine/sampling/sampler.py",
        r"return torch\.cat\(.* for t in \(drawn, best, mass\)\]\)\.tolist\(\)",
        "return [float(t) for t in (drawn, best, mass)]",
        ("tests/engine/sampling/test_sampling.py::test_a_draw_reads_the_device_once",),
    ),
    Breakage(
        "F14 every capture runs on a stream of its own",
        "engine/forward/graphs.py",
        r", capture_stream\(device\)\n",
        ", capture_stream.__wrapped__(device)\n",
        (f"{CAPTURE}::test_every_capture_runs_on_one_stream_of_its_card",),
    ),
    Breakage(
        "F14 a lane may be the capturing stream",
        "engine/bank/host/streams.py",
        r"priority=-1",
        "priority=0",
        (f"{CAPTURE}::test_a_lane_is_never_the_capturing_stream",),
    ),
    Breakage(
        "F15 a finalizer runs while a step is captured",
        "engine/forward/graphs.py",
        r"with garbage_kept\(\), capture:",
        "with capture:",
        (f"{CAPTURE}::test_no_finalizer_runs_while_a_step_is_captured",),
    ),
    Breakage(
        "F15 another thread's call spoils a capture",
        "engine/forward/graphs.py",
        r', capture_error_mode="thread_local"',
        "",
        (f"{CAPTURE}::test_other_threads_may_call_the_driver_meanwhile",),
    ),
    Breakage(
        "F16 a chunk's table takes the way that waits",
        "kernels/prefill/sparse.py",
        r"on_device\(rows, torch\.int32, q\.device\)",
        "torch.tensor(rows, dtype=torch.int32).to(q.device)",
        ("tests/kernels_cpu/test_host_values.py::test_no_table_takes_the_way_that_waits",),
    ),
    Breakage(
        "F18 blocks go back under a replayed graph's fetches",
        "engine/bank/host/tiered.py",
        r"(on none of these streams\n    )synchronize\(device\)",
        r"\1pass",
        (
            "tests/engine/bank/test_end.py"
            "::test_a_bank_waits_for_its_card_before_its_blocks_go_back",
        ),
    ),
    Breakage(
        "F18 pages are unlocked under a copy",
        "engine/bank/pool/pinned_memory.py",
        r"(would read or write pages that are gone\n    )synchronize_all\(\)",
        r"\1pass",
        (
            "tests/engine/bank/test_end.py"
            "::test_a_pool_waits_for_every_card_in_use_before_it_unlocks",
        ),
    ),
)
STEP = (
    Breakage(
        "the scores of the tail are counted too",
        "kernels/attention/dense.py",
        r"ordered\(best\), t < stop\)",
        "ordered(best), t < n)",
        ("tests/kernels/test_first_digit.py::test_lengths_around_a_tile_of_either_kernel",),
    ),
    Breakage(
        "where nothing is wanted the first histogram stays",
        "kernels/select/topk.py",
        r"if LEVEL == 2 and pid == 0:",
        "if LEVEL == 2 and pid == 0 and wanted > 0:",
        ("tests/kernels/test_first_digit.py::test_nothing_wanted_leaves_no_counts_behind",),
    ),
    Breakage(
        "a token is read before its copy has landed",
        "engine/sampling/greedy.py",
        r"self\._copied\.synchronize\(\)",
        "pass",
        (f"{AHEAD}::test_an_answer_ends_alike[length-full]",),
    ),
    Breakage(
        "an end token is fed twice where its step was issued ahead",
        "engine/session/generate.py",
        r"(\n +)if not ahead and len\(session\) < session\.limit:\n +yield DecodeRequest",
        r"\1if True:\1    yield DecodeRequest",
        (f"{AHEAD}::test_an_answer_ends_alike[eos-full]",),
    ),
    Breakage(
        "a step is committed before its token is known",
        "engine/runner/step.py",
        r"( +)token_id = (runner\.argmax\.read\(\))[\s\S]*?\.commit\(\[token_id\](.*)",
        r"\1session.commit([0]\3\n\1session.committed[-1] = \2",
        (f"{AHEAD}::test_a_step_that_is_given_up_has_not_run[waiting-full]",),
    ),
    Breakage(
        "exact mode issues steps ahead",
        "engine/exact/runner.py",
        r"return False(\n\n    def feed)",
        r"return True\1",
        (f"{AHEAD}::test_exact_mode_reads_first",),
    ),
)

SECOND = (
    Breakage(
        "C2 a step waits for an event of another capture",
        "engine/bank/host/working_set.py",
        r"wait\(self\._fetched\.pop\(layer, None\), ",
        "wait(self._fetched.get(layer), ",
        (
            "tests/engine/forward/test_captured_events.py"
            "::test_a_captured_step_waits_for_its_own_events_only",
        ),
    ),
    Breakage(
        "C4 a pool's idle slabs are taken for used",
        "engine/load/planner.py",
        r"idle_host=self\.host_tier\.idle,",
        "idle_host=0,",
        (f"{FREE}::test_what_a_pool_holds_idle_is_free_to_the_next_plan",),
    ),
    Breakage(
        "C4 blocks in use are taken for free",
        "engine/bank/pool/host_pool.py",
        r"for slab in self\._slabs if slab\.used == 0\)",
        "for slab in self._slabs)",
        (f"{FREE}::test_what_a_pool_holds_idle_is_free_to_the_next_plan",),
    ),
    Breakage(
        "C5 a step's split does not know our products",
        "tools/bench/split.py",
        r'    \("product_kernel", "linear"\),\n',
        "",
        (f"{TIMES}::test_every_kernel_of_a_step_has_its_stage",),
    ),
    Breakage(
        "C5 kernels that overlap count twice",
        "tools/bench/split.py",
        r"end - max\(start, ended\)",
        "end - start",
        (f"{TIMES}::test_kernels_that_overlap_count_once",),
    ),
    Breakage(
        "C6 a kernel's time holds a graph's launch",
        "tools/gpu/kernels.py",
        r"_replay_seconds\(function, repeats or 20\) - _launch_seconds\(\)",
        "_replay_seconds(function, repeats or 20)",
        (f"{TIMES}::test_a_kernels_time_has_no_graphs_launch_in_it[1]",),
    ),
    Breakage(
        "C7 every number of tokens compiles anew",
        "engine/forward/graphs.py",
        r"torch\._dynamo\.maybe_mark_dynamic\(argument, 1\)",
        "pass",
        ("tests/engine/batch/test_batch_widths.py::test_a_batch_grows_beyond_eight_sessions",),
    ),
    Breakage(
        "L1 plain is chosen on a device that takes no more work",
        "engine/forward/self_test.py",
        r"    if why:\n        _require_alive\(device, why, remedy\)\n",
        "",
        (f"{SELF}::test_a_device_that_takes_no_more_work_is_said_before_plain_is_chosen",),
    ),
    Breakage(
        "L2 no graph is tested before an answer runs one",
        "engine/forward/self_test.py",
        r"if rows > 1 or number or not torch\.cuda\.is_available\(\):",
        "if True:",
        (f"{SELF}::test_a_replay_that_is_wrong_either_way_leaves_the_plain_form",),
    ),
    Breakage(
        "L2 our kernels are given up before dependent launch is",
        "engine/forward/self_test.py",
        r"if not why or not supported\(device\):",
        "if True:",
        (f"{SELF}::test_dependent_launch_is_given_up_before_our_kernels_are[capture fails]",),
    ),
    Breakage(
        "L3 the form that will not run is compiled",
        "engine/forward/self_test.py",
        r"wanted = _Layer\(TorchLayer\(model\), \*sizes\)",
        "wanted = _Layer(TorchLayer(model, tuple(map(torch.compile, PLAIN))), *sizes)",
        (f"{SELF}::test_a_self_test_that_passes_compiles_nothing",),
    ),
    Breakage(
        "a kernel that drops its last columns passes",
        "kernels/launch/tolerance.py",
        r"OVERALL = 1e-2",
        "OVERALL = 0.2",
        (f"{SELF}::test_a_kernel_that_drops_its_last_columns_is_found",),
    ),
    Breakage(
        "only one row is tested",
        "engine/forward/self_test.py",
        r"STEP_ROWS = \(1, 3, MOST_ROWS\)",
        "STEP_ROWS = (1,)",
        (f"{SELF}::test_several_rows_and_the_last_layer_are_tested[three rows]",),
    ),
    Breakage(
        "only the first layer is tested",
        "engine/forward/self_test.py",
        r"sorted\(\{0, model\.config\.num_layers - 1\}\)",
        "[0]",
        (f"{SELF}::test_several_rows_and_the_last_layer_are_tested[last layer]",),
    ),
    Breakage(
        "L4 a killed child is waited for without a limit",
        "tools/common/program.py",
        r"process\.wait\(GRACE\)",
        "process.wait()",
        (f"{CHECK}::test_a_child_that_cannot_be_ended_is_left_behind",),
    ),
    Breakage(
        "L5 results of another tree are taken for this one's",
        "tools/check_gpu.py",
        r"same = \{name: f for name, f in results\.items\(\) if .*\}",
        "same = dict(results)",
        (f"{CHECK}::test_results_of_other_sources_are_run_again",),
    ),
    Breakage(
        "L5 a carried file is not read",
        "tools/check_gpu.py",
        r"results \|= carried",
        "pass",
        (f"{CHECK}::test_results_that_were_carried_here_are_taken",),
    ),
    Breakage(
        "C3 a kill loses what was found before it",
        "tools/check_gpu.py",
        r'(found\["sources"\] = sources\(\)\n +)write\(args\.out, results\)',
        r"\1pass",
        (f"{CHECK}::test_a_call_killed_at_any_boundary_goes_on_there[1]",),
    ),
    Breakage(
        "C3 the sections together take longer than a command has",
        "tools/check_gpu.py",
        r'"step": \(sections\.step, 150\)',
        '"step": (sections.step, 200)',
        (f"{CHECK}::test_every_command_fits_ten_minutes_and_the_most_valuable_comes_first",),
    ),
    Breakage(
        "C3 the process that measures runs a form that was found broken",
        "tools/gpu/context.py",
        r'if not fused\.get\("fault"\):',
        "if True:",
        (f"{CHECK}::test_a_form_that_a_process_found_broken_is_not_run",),
    ),
    Breakage(
        "P3 the past has a block for every 32,768 rows",
        "kernels/prefill/dense.py",
        r"LARGEST_BLOCK = CUDNN_BLOCK << 6",
        "LARGEST_BLOCK = CUDNN_BLOCK << 2",
        (f"{PAST}::test_a_past_of_a_million_has_seven_shapes_and_few_parts",),
    ),
    Breakage(
        "P3 parts weigh alike",
        "kernels/prefill/merge.py",
        r"theirs = tl\.exp\(other - base\)",
        "theirs = mine",
        (f"{MERGED}::test_parts_are_attention_over_all_rows",),
    ),
    Breakage(
        "P3 a part without rows makes NaN",
        "kernels/prefill/merge.py",
        r'base = tl\.where\(top == float\("-inf"\), 0\.0, top\)',
        "base = top",
        (f"{MERGED}::test_a_part_may_show_a_query_no_row",),
    ),
    Breakage(
        "sums of transformed rows of V are not transformed back",
        "kernels/attention/dense.py",
        r"return step_value_sums\(out, v\)",
        "return out",
        (f"{PACKED}::test_dense",),
    ),
    Breakage(
        "a step's rows of V in 4 bits are not transformed",
        "kernels/layer/store.py",
        r"store_row\(to, first_half, second_half, h, HALF, B, FACTOR, ODD, True\)",
        "store_row(to, first_half, second_half, h, HALF, 1, 1, ODD, True)",
        (f"{PACKED}::test_a_step_stores_what_pack_gives",),
    ),
    Breakage(
        "rows move to the host where that is the same memory",
        "engine/load/memory.py",
        r'self\.offload == "auto" and self\.one_memory\)',
        'self.offload == "auto" and self.device.type == "cpu")',
        (f"{INTEGRATED}::test_a_context_that_does_not_fit_there_fits_on_no_host_either",),
    ),
    Breakage(
        "one memory is counted twice",
        "engine/load/memory.py",
        r"    if one_memory:\n",
        "    if False:\n",
        (f"{INTEGRATED}::test_what_is_asked_to_be_on_the_host_is_counted_once_with_the_rest",),
    ),
    Breakage(
        "every graph has memory of its own",
        "engine/forward/graphs.py",
        r"torch\.cuda\.graph\(graph, pool=pool, ",
        "torch.cuda.graph(graph, ",
        (f"{CAPTURE}::test_all_graphs_of_a_card_share_one_pool",),
    ),
)

EXPERTS = "tests/kernels/test_experts.py"
MIXTURE = "tests/engine/forward/test_mixture_step.py"
MIXTURES = (
    Breakage(
        "equal logits go to the higher id",
        "kernels/experts/choose.py",
        r"\(BLOCK - e\)\[None, :\]",
        "(e + 1)[None, :]",
        (f"{EXPERTS}::test_equal_logits_go_to_the_lower_id[0.0]",),
    ),
    Breakage(
        "a logit that is not a number is never chosen",
        "kernels/experts/choose.py",
        r"tl\.where\(score != score, 0xFFFFFFFF, ordered\(score\)\)",
        "ordered(score)",
        (f"{EXPERTS}::test_a_router_that_is_not_a_number_spoils_its_own_rows[True]",),
    ),
    Breakage(
        "shares are of all experts where they are to sum to one",
        "kernels/experts/choose.py",
        r"over = inside if ALL else taken",
        "over = inside",
        (f"{EXPERTS}::test_a_choice[dtype0-True-7-32-4]",),
    ),
    Breakage(
        "an expert runs for rows that did not choose it",
        "kernels/experts/open.py",
        r"tl\.where\(\(\(members >> r\) & 1\) != 0, r, rows\)",
        "r",
        (f"{EXPERTS}::test_what_is_not_a_number_stays_in_its_row_and_in_its_expert",),
    ),
    Breakage(
        "gate and up of the clamped activation lie in halves",
        "kernels/experts/open.py",
        r"m = 2 \* first \+ i // HELD",
        "m = first + (i // HELD) * width",
        (f"{EXPERTS}::test_the_references_are_the_kernels[floats-activation0]",),
    ),
    Breakage(
        "an expert's sum begins with that of the one before",
        "kernels/experts/sum.py",
        r"acc = tl\.zeros\(\[HELD, 16\], tl\.float32\)(\n +# the next)",
        r"acc = acc\1",
        (f"{EXPERTS}::test_the_references_are_the_kernels[floats-activation0]",),
    ),
    Breakage(
        "an expert of few bits has the scales of another",
        "kernels/experts/sum.py",
        r"above \+ of_scales,",
        "of_scales,",
        (f"{EXPERTS}::test_the_references_are_the_kernels[int4-activation0]",),
    ),
    Breakage(
        "an expert's sums follow the number of rows",
        "kernels/experts/open.py",
        r"STEP=STEPS\[x\.itemsize\],",
        "STEP=STEPS[x.itemsize] // (2 if rows == 1 else 1),",
        (f"{EXPERTS}::test_a_rows_bits_do_not_depend_on_its_neighbours[floats-dtype1]",),
    ),
    Breakage(
        "the host chooses a step's experts",
        "engine/model/mixture.py",
        r"if self\.stacks is not None and \(",
        "if False and (",
        (
            f"{MIXTURE}::test_a_step_waits_for_nothing_and_launches_four_kernels_a_layer[gpt-oss-20b]",
        ),
    ),
    Breakage(
        "a step whose experts the host chooses is captured",
        "engine/runner/step_runner.py",
        r" and self\.model\.capturable\n",
        "\n",
        (f"{MIXTURE}::test_a_step_is_captured_unless_the_host_chooses[True-changes0]",),
    ),
    Breakage(
        "a chunk waits for every expert",
        "engine/model/mixture.py",
        r"mine, start = slice\(start, start \+ count\), start \+ count",
        "mine = torch.where(ids[order] == number)[0]",
        (f"{MIXTURE}::test_a_chunk_waits_once_a_layer",),
    ),
    Breakage(
        "a mixture's kernels are not tested before an answer",
        "engine/forward/self_test.py",
        r"\n        _check_mixtures\(model\)",
        "",
        (
            "tests/kernels/test_mixture_sessions.py"
            "::test_the_self_test_finds_a_kernel_that_fails_or_lies",
        ),
    ),
)

AHEAD_OF_LAUNCH = (
    Breakage(
        "C1 a branch on the form of rows is taken while the kernel runs",
        "kernels/rows/tiles.py",
        r"@triton\.constexpr_function\ndef packed",
        "@triton.jit\ndef packed",
        (
            "tests/kernels_cpu/test_static_branches.py"
            "::test_no_branch_of_a_kernel_asks_a_jitted_function",
        ),
    ),
    Breakage(
        "P5 what the self-test launches is not compiled before",
        "engine/load/ahead/launches.py",
        r"        launch_tested\(model, rotary\)\n",
        "        pass\n",
        (f"{COMPILED}::test_every_launch_of_a_first_step_is_among_those_compiled_ahead",),
    ),
    Breakage(
        "P5 weights of few bits are compiled as floats",
        "engine/load/ahead/launches.py",
        r"replace\(model, layers=layers, lm_head=held\(.*\)\)",
        "model",
        (f"{COMPILED}::test_every_launch_of_a_first_step_is_among_those_compiled_ahead",),
    ),
    Breakage(
        "P5 processes outlive an interrupt",
        "engine/load/ahead/children.py",
        r"        for process in processes:\n            end\(process\)",
        "        pass",
        (f"{COMPILED}::test_an_interrupt_or_a_failed_load_ends_the_processes[KeyboardInterrupt]",),
    ),
    Breakage(
        "P5 processes outlive a parent that was killed",
        "engine/load/ahead/__main__.py",
        r"os\.killpg\(0, signal\.SIGKILL\)",
        "pass",
        (f"{COMPILED}::test_no_process_outlives_a_parent_that_was_killed",),
    ),
    Breakage(
        "P5 a container of two cores is taken for its machine",
        "engine/base/cores/free_cores.py",
        r'found \+= _quota\(group / "cpu\.max"\)',
        "pass",
        ("tests/engine/plan/test_free_cores.py::test_a_quota_bounds_it",),
    ),
    Breakage(
        "P5 a warm cache starts processes all the same",
        "engine/load/ahead/children.py",
        r"count = 0 if mark\.exists\(\) else number\(\)",
        "count = number()",
        (f"{COMPILED}::test_a_process_that_launches_later_compiles_nothing",),
    ),
    Breakage(
        "every card has 132 SMs for the sparse kernel's splits",
        "kernels/attention/sparse.py",
        r"sized = budget, kv_heads, processors\(q\.device\)",
        "sized = budget, kv_heads, 132",
        ("tests/kernels/test_attention.py::test_sparse_on_cards_of_any_size",),
    ),
    Breakage(
        "every card has 132 SMs for a product's rounds",
        "kernels/layer/gemv.py",
        r"ENOUGH \* processors\(x\.device\)",
        "ENOUGH * 132",
        (f"{COMPILED}::test_launch_shapes_follow_the_cards_size",),
    ),
)

RECURRENT = (
    Breakage(
        "decays are summed in one part, and small ones are lost beside large ones",
        "kernels/recurrent/gpu/ssd_chunk.py",
        r"    coarse = tl\.floor\(g \* 1024\.0 \+ 0\.5\) \* 0\.0009765625\n",
        "    coarse = g\n",
        (f"{SSD}::test_a_prompt",),
    ),
    Breakage(
        "S has taken the tokens that are to stay apart from it",
        "kernels/recurrent/gpu/ssd_chunk.py",
        r"if chunk \+ 1 == wholes:",
        "if chunk + 1 == chunks:",
        (f"{SSD}::test_prompts_of_every_residue",),
    ),
    Breakage(
        "a prompt's convolution sees zeros before its chunk",
        "kernels/recurrent/gpu/conv.py",
        r"tl\.where\(place >= 0, new, old\)",
        "new",
        (f"{SSD}::test_a_prompts_convolution",),
    ),
    Breakage(
        "Mamba-2's kernels are not tested before the first answer",
        "engine/forward/recurrent/self_test.py",
        r"if layer\.mixer is not None\]",
        "if isinstance(layer.mixer, DeltaNet)]",
        (f"{SSD}::test_the_self_test_finds_a_kernel_that_lies",),
    ),
)

TABLE = FINDINGS + STEP + SECOND + MIXTURES + AHEAD_OF_LAUNCH + RECURRENT

if __name__ == "__main__":
    sys.exit(main(table=TABLE))
