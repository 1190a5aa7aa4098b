"""Faults that users of other projects reported, tried here: each before and now, and the tests that
show it.

A number is the trial's. The sentences under `before` were observed at commit c0c37c05; "unknown"
where nobody had tried. A row holds when all of its tests pass.
"""

from pathlib import Path

from benchmarks.report import Report
from benchmarks.shared.points import Point, add

MODELS = (
    Point(
        "trial 1: a pretrained model with the default rates",
        "held out 4.52 before and 4.49 after 24 epochs; rates and warm-up of the demo",
        "measured by --only 1",
        (),
    ),
    Point(
        "trial 2: special tokens, template and generation config of an instruct model",
        "exported end of text <|endoftext|>, no template, no generation_config.json",
        "the files that were given, to the byte; every end of text that they name",
        (
            "model/test_given_files:test_what_goes_in_comes_out",
            "data/test_tokenizer_files:test_roles_come_from_the_files",
            "data/test_tokenizer_files:test_the_template_is_found_where_the_library_looks",
            "control/test_export:test_files_of_the_model_come_from_another_peer_to_the_byte",
        ),
    ),
    Point(
        "trial 3: an end of text that is written with other bars",
        "no role found; documents run together, export without an end",
        "the files say the id, whatever its text is",
        ("data/test_tokenizer_files:test_roles_come_from_the_files",),
    ),
    Point(
        "trial 4: rope_parameters default and rope_scaling yarn in one config",
        "YaRN ignored in silence",
        "tables equal to those of transformers, wherever a config puts the numbers",
        ("model/test_rope:test_the_tables_are_those_of_transformers",),
    ),
    Point(
        "trial 5: rope_parameters without theta, rope_theta at the top",
        "refused",
        "read as transformers does",
        (
            "model/test_rope:test_the_tables_are_those_of_transformers",
            "model/test_pretrained:test_older_files_say_the_rotary_base_elsewhere",
        ),
    ),
    Point(
        "trial 7: a [PAD] beyond the vocabulary",
        "predicted: refused, the hint leads into a second refusal",
        "refused, with a step that works",
        ("cli/test_validate:test_a_token_beyond_the_vocabulary_is_named_with_a_step_that_works",),
    ),
    Point(
        "trial 8: model.safetensors is a Git LFS pointer",
        "'header too large'",
        "called a Git LFS pointer, with the command that fetches the file",
        (
            "model/test_pretrained:test_a_git_lfs_pointer_is_called_that",
            "data/test_places:test_a_git_lfs_pointer_is_called_that",
            "data/test_tokenizer_files:test_damaged_files_are_named",
        ),
    ),
    Point(
        "trial 9: exported adapters in AutoPeftModelForCausalLM",
        "no base_model_name_or_path, no tokenizer",
        "they open by themselves, and merge",
        (
            "model/test_given_files:test_adapters_open_by_themselves_and_merge",
            "control/test_export:test_adapters_are_merged_into_drawn_or_given_weights",
        ),
    ),
)
DATA = (
    Point(
        "trial 10: one row of null in a local .jsonl",
        "the whole file refused",
        "the row is left out and counted",
        (
            "data/test_rows:test_every_format_gives_its_rows_and_counts_those_without_text",
            "data/test_rows:test_left_out_rows_are_said_once_for_each_doubling",
        ),
    ),
    Point(
        "trial 11: data.column of a local file",
        "accepted, and 'text' was read",
        "the field of that name is read",
        (
            "data/test_rows:test_a_field_of_any_name_is_read",
            "data/test_streamed_documents:test_a_column_of_another_name",
        ),
    ),
    Point(
        "trial 12: a .txt in UTF-16 or Latin-1",
        "27,002 tokens, every second a NUL",
        "UTF-16 is recognised; what is not is refused with the command that converts it",
        (
            "data/test_rows:test_encodings_are_recognised",
            "data/test_rows:test_what_is_not_recognised_is_refused_with_the_command",
            "data/test_rows:test_other_encodings_are_read_as_text",
            "data/test_streamed_documents:test_utf_16_is_no_text_until_it_is_said",
        ),
    ),
    Point(
        "trial 14: a directory, .json, .jsonl.zst, .csv, .md",
        "'cannot read', or a list of endings without a next step",
        "read; a directory without text says what can be read",
        (
            "data/test_rows:test_every_format_gives_its_rows_and_counts_those_without_text",
            "data/test_rows:test_a_directory_is_all_its_files_each_a_document_or_more",
            "data/test_rows:test_a_directory_without_text_says_what_can_be_read",
        ),
    ),
    Point(
        "trial 15: a data set without a card, files shard_00000.parquet",
        "finds nothing",
        "all of it is the training split, as `datasets` has it",
        (
            "data/test_splits:test_files_of_the_training_split_are_chosen",
            "data/test_streamed_hub:test_without_a_card_names_say_it",
        ),
    ),
    Point(
        "trial 16: a card with data_dir",
        "finds nothing",
        "the files of that directory",
        (
            "data/test_splits:test_files_of_the_training_split_are_chosen",
            "data/test_splits:test_the_card_at_the_beginning_of_a_readme",
            "data/test_splits:test_a_card_names_files_of_its_own_data_set_alone",
        ),
    ),
    Point(
        "trial 17: train/0.jsonl beside train_test/test-0.jsonl",
        "the test file is trained on",
        "it is not",
        (
            "data/test_splits:test_files_of_the_training_split_are_chosen",
            "data/test_rows:test_what_is_held_out_by_its_name_is_not_trained_on",
        ),
    ),
    Point(
        "trial 20: gzip unasked, a tag with a suffix, a wrong Content-Range",
        "predicted: fine",
        "unpacked where all of it comes, else refused; the tag names its version",
        (
            "data/test_servers:test_what_a_server_packs_unasked_is_unpacked_where_all_of_it_comes",
            "data/test_servers:test_packed_parts_and_other_parts_are_refused",
            "data/test_servers:test_a_tag_that_a_server_adds_to_names_the_same_version",
            "data/test_streamed_hostile:test_a_part_that_nobody_asked_for_is_refused",
        ),
    ),
)
MACHINES = (
    Point(
        "trial 21: the same nine bridges on both machines of a LAN",
        "trains over reversed ways; the banner names a bridge",
        "direct on the LAN's address; measured by --only 8",
        (
            "reach/test_interfaces:test_addresses_of_bridges_and_tunnels_come_last",
            "reach/test_interfaces:test_an_address_of_an_own_bridge_is_not_dialled",
            "reach/test_interfaces:test_bridges_are_not_announced_beside_the_lan",
        ),
    ),
    Point(
        "trial 22: transport.keepalive_s=5 beside the default",
        "lost and found four times in four minutes on loopback",
        "a server permits the probes of any setting",
        ("transport/test_silence:test_a_line_without_calls_stays_up_whatever_is_probed",),
    ),
    Point(
        "trial 23: the memory limit of a nested control group, and of version 1",
        "predicted: one file is read",
        "the lowest limit of every level, in both versions",
        (
            "telemetry/test_resources:test_limits_of_every_level_are_found",
            "telemetry/test_resources:test_the_lowest_limit_counts",
            "model/test_device:test_the_limit_of_a_control_group_counts",
        ),
    ),
    Point(
        "trial 24: a solo start in 4 GB",
        "predicted: each of five daemons counts all of it",
        "each pledges what it takes, and a solo start divides the room",
        (
            "config/test_memory:test_daemons_of_a_solo_start_share_main_memory",
            "config/test_memory:test_main_memory_is_what_other_daemons_and_the_process_leave",
            "control/test_pledges:test_others_are_counted_and_the_own_pledge_is_not",
        ),
    ),
    Point(
        "trial 25: a quota of 2 of 8 cores",
        "predicted: threads for 8",
        "as many threads as quota and affinity allow",
        (
            "telemetry/test_resources:test_cores_are_those_of_affinity_and_quota",
            "model/test_device:test_the_number_of_threads_is_set",
        ),
    ),
    Point(
        "trial 27: a card below sm_80",
        "predicted: bf16 always",
        "fp16 with a scale, or fp32, by measurement",
        (
            "optim/test_tuning:test_an_old_card_computes_in_the_format_that_is_faster",
            "model/test_device:test_a_gpu_computes_in_bf16_where_it_has_units_for_it",
            "model/test_precision:test_after_an_overflow_the_same_backward_is_made_again",
        ),
    ),
    Point(
        "trial 28: a clock that is an hour off for five minutes",
        "unknown",
        "the others train on, led by another if need be; it takes part again within a minute of "
        "being right, and says that its clock is wrong",
        (
            "sim/test_wrong_clocks:test_an_hour_off_for_five_minutes",
            "config/test_timekeeping:test_a_wrong_clock_is_said_once_and_so_is_a_right_one",
            "control/test_causes:test_a_reason_is_named_with_its_next_step",
        ),
    ),
    Point(
        "trial 29: p2pd stopped for a minute, then killed",
        "unknown",
        "replaced after two checks without an answer, and again when it is killed",
        (
            "transport/test_p2p:test_a_p2pd_that_stands_still_is_replaced_and_then_one_that_dies",
            "transport/test_p2p:test_a_killed_p2pd_restarts_while_direct_calls_continue",
            "transport/test_p2p:test_a_p2pd_that_is_not_listened_to_any_more_is_replaced",
        ),
    ),
    Point(
        "trial 30: the link down for 15 minutes behind a router",
        "unknown; pauses between two dials had grown to five minutes",
        "dials every quarter of a minute while it has no connection at all",
        (
            "transport/test_parts:test_a_peer_that_is_cut_off_dials_again_soon",
            "reach/test_ladder:test_attempts_that_fail_become_rare_and_never_stop",
            "sim/test_frozen:test_a_peer_that_is_gone",
        ),
    ),
    Point(
        "trial 34: PYTHONIOENCODING=ascii",
        "unknown",
        "every verb is readable; letters without a likeness are question marks",
        (
            "cli/test_terminals:test_every_verb_is_readable_on_every_terminal",
            "control/test_terminal:test_any_text_can_be_written",
        ),
    ),
)


def rows(report: Report, root: Path) -> None:
    """A row for every trial."""
    add(report, root, "7", (*MODELS, *DATA, *MACHINES))
