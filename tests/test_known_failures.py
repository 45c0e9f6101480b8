"""What users of other systems ran into, by kind of fault, and the tests that hold it off here."""

import ast
from pathlib import Path

import pytest

JSON_GRAMMAR, GRAMMAR, LOOP = "schemas/test_json_grammar", "engine/test_grammar", "engine/test_loop"
RESULTS, SOURCE, FINISH, LLM = "jobs/test_results", "jobs/test_source", "jobs/test_finish", "engine/test_llm"
ARROW, CLIENT, JOB, WORKER = "jobs/test_arrow_types", "engine/test_client", "jobs/test_job", "worker/test_worker"
DELIVERY, BROKER_LOSS, QUEUE = "worker/test_delivery", "faults/test_broker_loss", "jobs/test_queue"

STRUCTURED_OUTPUT = {
    "legal infinite loop": [
        f"{LOOP}::test_legal_infinite_loop_a_model_that_loves_blanks_ends_valid_or_says_that_it_was_cut",
        f"{GRAMMAR}::test_no_blank_can_repeat_for_ever",
        "engine/test_closing::test_the_worst_model_cannot_overrun_its_budget_nor_leave_half_a_document",
    ],
    "a document that its budget cuts": [
        "engine/test_closing::test_a_random_document_is_closed_wherever_its_shortest_end_fits",
        "engine/test_closing::test_a_row_that_ends_in_time_is_left_alone",
    ],
    "truncation taken for output": [
        f"{RESULTS}::test_every_finish_reason_has_its_status_and_no_failure_has_a_label",
        f"{RESULTS}::test_a_truncated_row_gets_more_budget_up_to_the_models_limit",
        f"{LLM}::test_a_budget_that_cuts_a_document_says_so",
    ],
    "silent repair": [f"{RESULTS}::test_silent_repair_a_document_cut_by_its_budget_is_never_completed"],
    "useless retry": [
        f"{RESULTS}::test_a_truncated_row_is_not_tried_again_with_the_same_budget",
        f"{RESULTS}::test_a_next_try_always_differs_from_the_last",
    ],
    "constraint dropped": [
        f"{JSON_GRAMMAR}::test_the_plan_says_what_the_engine_does",
        f"{JSON_GRAMMAR}::test_no_random_schema_lets_a_document_break_an_enforced_keyword",
        f"{JSON_GRAMMAR}::test_real_schemas_compile_and_those_fully_enforced_admit_nothing_invalid",
    ],
    "pattern too tight": [f"{JSON_GRAMMAR}::test_the_plan_says_what_the_engine_does"],
    "wrong number range": [f"{JSON_GRAMMAR}::test_number_bounds_admit_no_number_outside"],
    "gate by-pass of a node without a type": [f"{JSON_GRAMMAR}::test_the_plan_says_what_the_engine_does"],
    "process death in the compiler": [
        f"{GRAMMAR}::test_schemas_that_took_other_servers_down_compile_within_the_limit",
        f"{CLIENT}::test_a_poison_request_ends_with_an_error_and_its_neighbours_complete",
    ],
    "unbounded compile": [
        f"{GRAMMAR}::test_a_compile_past_its_time_limit_fails_alone_and_threads_do_not_pile_up",
        f"{GRAMMAR}::test_schemas_that_took_other_servers_down_compile_within_the_limit",
        f"{JSON_GRAMMAR}::test_a_schema_that_unfolds_too_far_is_checked_only",
        "schemas/test_ebnf::test_large_repeats_take_few_rules",
    ],
    "unhelpful error": [
        "schemas/test_json_schema::test_a_huge_upper_bound_is_checked_and_named_rather_than_refused",
        "schemas/test_json_schema::test_a_schema_that_cannot_work_is_refused_with_place_and_cure",
        "schemas/test_ebnf::test_a_grammar_that_cannot_work_is_refused_with_place_and_cure",
    ],
    "blast radius of a bad constraint": [
        f"{LOOP}::test_a_broken_constraint_and_a_dead_end_end_their_own_rows_only",
        f"{RESULTS}::test_a_row_whose_own_constraint_is_broken_leaves_its_neighbours_alone",
        f"{RESULTS}::test_rows_of_mixed_kinds_are_each_held_to_their_own_constraint",
    ],
    "one row kills the engine": [
        f"{GRAMMAR}::test_a_malformed_constraint_is_an_error_and_the_next_one_works",
        "schemas/test_constraints::test_one_malformed_constraint_after_a_good_one_harms_no_other",
        f"{LOOP}::test_bad_requests_end_alone_with_a_reason",
    ],
    "degenerate parameters": [
        "schemas/test_constraints::test_bad_choices_are_refused",
        f"{LLM}::test_bad_so_args_are_refused_when_built",
        f"{LLM}::test_bad_sampling_parameters_are_refused_when_built",
        "jobs/test_submit::test_a_bad_constraint_is_refused_before_anything_is_written",
    ],
    "cross-row contamination": [
        f"{LOOP}::test_a_mixed_batch_of_256_rows_gives_each_row_what_it_gets_alone",
        f"{GRAMMAR}::test_rows_without_a_matcher_are_free_and_neighbours_do_not_mix",
        "engine/test_sampler::test_a_row_of_a_mixed_batch_gets_what_it_gets_alone",
    ],
    "jump and tokenisation": [
        "engine/test_forced::test_forcing_changes_no_answer",
        "engine/test_forced::test_forced_tokens_are_the_canonical_ones_up_to_an_open_merge",
        "engine/test_forced::test_every_label_stays_reachable_with_its_canonical_tokens",
    ],
    "dead end": [
        f"{LOOP}::test_a_broken_constraint_and_a_dead_end_end_their_own_rows_only",
        "engine/test_sampler::test_a_row_that_allows_nothing_gets_minus_one_and_its_neighbours_are_unaffected",
    ],
    "key order": [
        f"{JSON_GRAMMAR}::test_keys_keep_the_order_of_the_schema",
        f"{LLM}::test_json_keys_come_in_the_order_of_the_schema",
        f"{RESULTS}::test_a_struct_label_has_its_values_in_schema_order",
    ],
    "missing confidence": ["engine/test_labels::test_a_labels_probability_is_that_of_brute_force"],
    "prompt injection": [
        "engine/test_text::test_prompt_injection_a_row_that_names_special_tokens_forges_no_turn",
        "engine/test_encoder::test_protected_text_holds_no_control_token_whatever_it_says",
        f"{GRAMMAR}::test_the_name_of_a_special_token_is_written_as_text_never_as_the_token",
    ],
}

OFFLINE_BATCH = {
    "one row kills the job": [
        f"{LLM}::test_a_prompt_that_is_too_long_fails_alone_and_in_its_place",
        f"{LOOP}::test_a_prompt_that_is_too_long_ends_alone_with_its_length_and_the_limit",
        "jobs/test_prompts::test_a_null_empty_or_non_text_prompt_ends_its_row",
    ],
    "unbounded buffering": [
        f"{SOURCE}::test_the_first_rows_of_a_million_row_group_cost_little_memory",
        f"{FINISH}::test_memory_does_not_grow_with_the_number_of_rows",
        "jobs/test_plan::test_unbounded_buffering_rows_of_a_megabyte_make_chunks_of_few_rows",
        f"{LOOP}::test_constraints_of_finished_rows_are_forgotten_and_those_of_unfinished_rows_are_not",
    ],
    "lifecycle hang": [
        f"{LOOP}::test_an_idle_engine_takes_a_second_job",
        "jobs/test_submit::test_zero_rows_end_at_once_with_an_empty_output",
        f"{CLIENT}::test_a_hang_is_noticed_and_cured_by_a_restart",
    ],
    "poisoned worker": [
        f"{WORKER}::test_a_worker_whose_engine_is_given_up_leaves_and_its_messages_go_back",
        f"{WORKER}::test_an_engine_that_dies_is_replaced_under_the_running_chunks",
        "jobs/test_spill::test_rows_that_were_done_are_not_asked_again_and_come_out_as_they_were",
    ],
    "slow failure": [
        f"{CLIENT}::test_a_failed_start_raises_its_cause_and_tries_no_further",
        f"{LOOP}::test_a_cache_too_small_for_one_row_is_refused_at_the_start",
        f"{WORKER}::test_an_engine_that_cannot_start_ends_its_worker_and_fails_its_jobs_with_the_cause",
        f"{WORKER}::test_an_engine_that_cannot_start_fails_no_job_that_another_worker_serves",
    ],
    "misalignment": [
        f"{RESULTS}::test_results_are_in_row_order_whatever_order_requests_finish_in",
        f"{RESULTS}::test_equal_questions_of_a_chunk_are_asked_once_and_all_answered",
        "jobs/test_verify::test_swapped_rows_in_the_output_are_found",
    ],
    "broken resume": ["e2e/test_demo_flow::test_an_interrupted_submit_is_resumed_without_doing_anything_twice"],
    "coarse checkpoint": ["jobs/test_spill::test_a_second_death_keeps_the_rows_of_both_attempts"],
    "no tombstone": [
        f"{RESULTS}::test_rows_that_are_not_asked_cost_no_request",
        "jobs/test_prompts::test_rows_for_which_the_filter_is_false_are_skipped",
        "jobs/test_reuse::test_rows_that_are_skipped_leave_a_tombstone_and_are_never_asked",
    ],
    "lost rows": [
        f"{FINISH}::test_every_row_comes_back_in_order_beside_its_label",
        f"{JOB}::test_a_part_holds_exactly_its_chunks_rows_in_order",
    ],
    "count lie": [
        f"{FINISH}::test_ok_and_every_other_status_add_up_to_the_rows",
        "jobs/test_verify::test_a_missing_row_is_found",
    ],
    "wrong terminal state": [f"{FINISH}::test_a_job_ends_as_its_rows_did"],
    "non-determinism": [
        "engine/test_parity::test_the_same_rows_give_the_same_tokens_in_every_arrangement",
        f"{RESULTS}::test_seeds_come_from_the_question_not_from_its_place",
    ],
    "silent shift": [f"{LLM}::test_completions_come_in_prompt_order_whatever_their_lengths"],
    "silent input loss": [f"{LOOP}::test_a_prompt_that_is_too_long_ends_alone_with_its_length_and_the_limit"],
}

PARQUET = {
    "32-bit offsets": [
        f"{SOURCE}::test_the_rows_of_one_read_are_bounded_in_bytes",
        f"{SOURCE}::test_plain_dictionary_and_large_text_are_one_column",
    ],
    "nested chunking": [f"{SOURCE}::test_nested_columns_in_a_big_row_group_are_read_in_pieces"],
    "null type of a first batch": [
        f"{ARROW}::test_a_first_batch_of_nulls_has_the_same_schema_as_any_other",
        f"{SOURCE}::test_a_first_file_of_nulls_takes_the_type_of_the_others",
    ],
    "reader leak": [
        f"{FINISH}::test_memory_does_not_grow_with_the_number_of_rows",
        f"{SOURCE}::test_the_reader_keeps_few_files_open",
    ],
    "whole row group buffered": [f"{SOURCE}::test_the_first_rows_of_a_million_row_group_cost_little_memory"],
    "dictionaries that differ": [
        f"{SOURCE}::test_dictionaries_that_differ_between_row_groups_are_decoded",
        f"{SOURCE}::test_plain_dictionary_and_large_text_are_one_column",
    ],
    "late column dropped": [
        f"{SOURCE}::test_a_column_added_in_a_later_file_is_null_in_the_earlier",
        f"{SOURCE}::test_a_type_change_names_both_files_and_types",
    ],
    "no row groups": [
        f"{SOURCE}::test_empty_row_groups_anywhere_are_stepped_over",
        f"{FINISH}::test_a_job_without_rows_ends_at_once_as_done",
    ],
    "values that a column cannot hold": [
        f"{ARROW}::test_a_value_that_would_be_changed_is_refused",
        f"{ARROW}::test_what_it_leaves_open_is_json_text",
        f"{RESULTS}::test_a_document_that_its_column_cannot_hold_is_not_ok",
    ],
    "duplicate column names": [f"{SOURCE}::test_duplicate_column_names_are_refused"],
    "file without a footer": [f"{SOURCE}::test_a_file_without_its_footer_is_refused"],
    "stray file beside the output": [
        f"{FINISH}::test_what_a_killed_finisher_left_breaks_no_reader",
        "jobs/test_store::test_a_kill_at_any_point_leaves_a_whole_file_or_none",
    ],
    "lenient JSON": ["schemas/test_json_schema::test_text_that_no_strict_reader_takes_is_not_json"],
}

CELERY_AND_REDIS = {
    "double execution": [
        f"{DELIVERY}::test_a_chunk_that_runs_longer_than_the_visibility_timeout_runs_once",
        f"{DELIVERY}::test_a_second_delivery_of_a_running_or_committed_chunk_does_nothing",
        f"{BROKER_LOSS}::test_a_cut_connection_does_not_start_running_chunks_again",
    ],
    "lost task": [
        f"{DELIVERY}::test_a_worker_killed_at_any_hop_loses_and_doubles_nothing",
        f"{DELIVERY}::test_a_message_lost_with_its_worker_is_found_missing_and_sent_again",
        f"{WORKER}::test_early_acknowledgement_is_refused",
    ],
    "poison task delivered for ever": [
        f"{DELIVERY}::test_a_chunk_that_kills_its_workers_is_parked_and_its_neighbour_is_not",
        f"{DELIVERY}::test_a_chunk_that_always_fails_is_parked_with_its_cause_and_the_job_goes_on",
    ],
    "hoarded messages": [f"{DELIVERY}::test_no_worker_hoards_chunks_that_another_could_run"],
    "deaf after a reconnect": [
        f"{BROKER_LOSS}::test_a_worker_consumes_again_after_several_losses_in_a_row",
        f"{BROKER_LOSS}::test_a_broker_restart_in_mid_task_costs_neither_worker_nor_engine_nor_a_second_run",
    ],
    "tasks lost with the broker": [
        f"{DELIVERY}::test_a_flushed_broker_loses_nothing_and_doubles_nothing_that_runs",
        f"{QUEUE}::test_reconcile_after_a_flush_sends_all_that_is_pending",
    ],
    "daemonic children": [f"{WORKER}::test_a_worker_runs_a_job_to_its_end_and_leaves_nothing_behind"],
    "CUDA in a forked child": [f"{WORKER}::test_importing_the_worker_loads_no_torch"],
    "result backend": [
        f"{QUEUE}::test_five_thousand_chunks_cost_no_memory_and_leave_no_results",
        f"{WORKER}::test_settings_that_lose_work_are_refused",
    ],
    "completion by chord": [
        "jobs/test_wait::test_a_wait_ends_with_the_last_part_and_writes_the_output",
        f"{FINISH}::test_racing_finishers_agree",
    ],
    "two beats, and one that was away": [
        "worker/test_beat::test_two_beats_start_one_job_for_a_slot_and_end_on_sigterm",
        "jobs/test_nightly::test_each_due_time_is_one_job_whoever_fires_it_and_how_often",
        "jobs/test_nightly::test_of_the_nights_that_were_missed_the_last_is_caught_up",
    ],
    "clock that steps": [
        f"{QUEUE}::test_a_step_of_the_clock_hides_no_missing_chunk",
        f"{QUEUE}::test_renewal_dates_anew_what_a_clock_that_went_back_dated_in_the_future",
    ],
}
TABLES = STRUCTURED_OUTPUT | OFFLINE_BATCH | PARQUET | CELERY_AND_REDIS


@pytest.mark.parametrize("kind", TABLES)
def test_each_kind_of_fault_has_its_tests(kind: str, repo_root: Path) -> None:
    for name in TABLES[kind]:
        path, _, function = name.partition("::")
        tree = ast.parse((repo_root / "tests" / f"{path}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
