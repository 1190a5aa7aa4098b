"""Rows that need no live swarm: attacks that tests show, and the table of limits."""

from pathlib import Path

from benchmarks.report import Report
from benchmarks.shared.points import Point, add
from benchmarks.strangers import direct, files

POINTS: dict[str, tuple[Point, ...]] = {
    "5": (
        Point(
            "a manifest names a file of the joiner",
            "file:~/passwords.txt without a hash was opened and sent to stage 1",
            "a file without a hash is its owner's alone",
            (
                "data/test_named_files:test_a_path_without_a_hash_is_the_owners_alone",
                "data/test_named_files:test_a_file_with_a_hash_is_found_and_compared_first",
                "data/test_named_files:test_a_tokenizer_without_a_hash_is_the_owners_alone",
                "data/test_named_files:test_what_is_no_regular_file_is_neither_read_nor_waited_for",
            ),
        ),
    ),
    "12": (
        Point(
            "fetches where the manifest points",
            "a redirect led to 127.0.0.1; one line was 100,000 addresses, each asked",
            "the address that is dialled is public, and few are asked",
            (
                "data/test_fetching:test_a_redirect_leads_to_no_place_of_this_machine",
                "data/test_fetching:"
                "test_a_name_is_resolved_once_and_the_checked_address_is_dialled",
                "data/test_fetching:"
                "test_an_address_of_this_machine_is_refused_until_the_user_allows_it",
                "data/test_fetching:"
                "test_a_joiner_asks_for_few_sizes_and_for_none_that_the_manifest_has",
            ),
        ),
    ),
    "13": (
        Point(
            "a tokenizer's pattern that backtracks",
            "a Rust panic ended the data task, and rows() hung",
            "a typed error, in bounded time",
            (
                "data/test_confined:test_a_pattern_that_the_library_gives_up_is_a_fault",
                "data/test_confined:test_a_pattern_that_does_not_end_is_ended_by_the_kernel",
                "data/test_confined:test_a_worker_that_dies_leaves_nobody_waiting",
            ),
        ),
    ),
    "6": (
        Point(
            "text that others read",
            "said to stay with its peers; the first stage reads it exactly",
            "the option keeps layers at the ends, and the documents say what it proves",
            (
                "model/test_text_read_by_others:"
                "test_stage_1_reads_every_token_where_the_ends_hold_no_layer",
                "model/test_text_read_by_others:"
                "test_behind_a_trained_layer_the_nearest_row_is_another_token",
            ),
        ),
    ),
    "16": (
        Point(
            "a Content-Length that is no number",
            "an uncaught ValueError",
            "a typed error",
            ("data/test_fetching:test_a_length_that_is_no_number",),
        ),
    ),
    "17": (
        Point(
            "an old p2pd",
            "its QUIC could be made to take all memory",
            "QUIC is off, and a p2pd that holds too much is started again",
            (
                "transport/test_p2p:test_p2pd_listens_on_udp_only_for_quic",
                "transport/test_p2p:test_without_quic_nothing_is_dialled_over_udp",
                "transport/test_p2p:test_a_p2pd_that_holds_too_much_memory_is_replaced",
                "transport/test_p2p:test_short_of_memory_a_p2pd_hangs_up_on_strangers_only",
            ),
        ),
    ),
    "18": (
        Point(
            "owners that write any finite parameters",
            "adopted by everybody",
            "bounded by the longest step of the optimizer",
            (
                "optim/test_step_limit:test_every_step_of_an_owner_is_within_the_bounds",
                "optim/test_step_limit:test_parameters_that_moved_too_far_are_refused",
                "training/test_impossible_parameters:"
                "test_parts_beyond_the_longest_step_are_refused_and_stepped_by_another",
            ),
        ),
        Point(
            "two replicas that differ",
            "two repetitions of every epoch, nobody blamed",
            "a bounded number of repetitions for each liar",
            (
                "training/test_leader:test_replicas_that_differ_cost_a_bounded_number_of_epochs",
                "sim/test_members:test_of_two_replicas_a_liar_costs_two_epochs",
            ),
        ),
        Point(
            "a silent donor",
            "a fetch without an expected digest waited 120 s",
            "it is waited for as long as its answer can take",
            (
                "checkpoint/test_description_wait:"
                "test_a_silent_donor_costs_a_few_seconds_where_the_state_is_small",
            ),
        ),
    ),
    "table": (
        Point(
            "every RPC and every training message has a row",
            "bounds in many places, or none",
            "one table, compared with protos/ and docs/protocol.md",
            (
                "transport/test_limits:test_every_rpc_and_every_training_message_has_a_row",
                "transport/test_limits:test_the_documentation_shows_the_same_table",
            ),
        ),
    ),
}
"""By number: attacks that a direct check shows better than a minute of a live swarm; "table": the
table of limits."""


def rows(report: Report, root: Path, number: str) -> None:
    """The rows of one number that need no swarm under attack."""
    if number == "5":
        files.rows(report, root / "files")
    if number == "14":
        direct.tokens(report)
    if number == "16":
        direct.records(report)
    if number in POINTS:
        add(report, root, number, POINTS[number])
