"""Faults that a first hour with two machines met: each before and now, and the tests that show it.

The sentences under ``before`` were observed at commit c0c37c05. A row holds when all of its tests
pass, so it fails when it is no longer true.
"""

from pathlib import Path

from benchmarks.report import Report
from benchmarks.shared.points import Point, add

POINTS = (
    # ------------------------------------------------------------ lost work
    Point(
        "a stop loses the work",
        "12 epochs, stop, start: epoch 0; after 65 it goes on from 60",
        "the committed epoch is on disk before the process ends",
        (
            "training/test_stopping:test_a_stop_in_an_epoch_keeps_the_version_it_begins_from",
            "training/test_stopping:test_training_goes_on_to_the_bit_after_a_stop",
            "sim/test_stops:test_stops_in_order_lose_no_committed_epoch",
            "sim/test_stops:test_cells_that_are_stopped_lose_no_committed_epoch",
        ),
    ),
    Point(
        "a crowd is turned away",
        "22 of 29 joins within 8.4 s ended with exit code 4",
        "a joiner waits in a queue and is told its place",
        (
            "swarm/test_crowd:test_a_crowd_waits_in_the_founders_queue_and_gets_into_a_plan",
            "cli/test_joining:test_a_joiner_waits_in_the_queue_and_is_told_of_it",
            "control/test_retries:test_a_busy_swarm_is_waited_for_as_long_as_it_answers",
            "transport/test_ask:test_members_and_small_questions_do_not_queue",
        ),
    ),
    # ------------------------------------------------------------ wrong or harmful words
    Point(
        "a clock that is wrong",
        "READY healthy, then 'waiting for an ends peer'",
        "status and log name the difference and the command that mends it",
        (
            "config/test_timekeeping:test_a_wrong_clock_is_said_once_and_so_is_a_right_one",
            "control/test_causes:test_a_reason_is_named_with_its_next_step",
            "transport/test_clocks:test_most_clocks_outvote_one",
        ),
    ),
    Point(
        "own children that load",
        "'WAITING degraded, invite one'",
        "the stages that load on this machine are named, without alarm",
        (
            "control/test_causes:test_what_belongs_to_a_start_is_said_and_no_fault",
            "control/test_text:test_what_is_usual_is_told_without_alarm",
        ),
    ),
    Point(
        "work of a peer that starts",
        "'my work the ends ()' of a peer that will host stage 2",
        "nothing is said until the stage is known",
        ("control/test_text:test_a_stage_that_is_being_built_is_named_once_it_is_known",),
    ),
    Point(
        "every cause of waiting",
        "'waiting for a way between A and B', 'stages that hold one version in common'",
        "one table names cause, stages, peers and next step",
        (
            "control/test_causes:test_a_reason_is_named_with_its_next_step",
            "control/test_causes:test_the_deepest_reason_comes_first",
            "control/test_causes:test_every_row_of_the_table_is_tested",
        ),
    ),
    Point(
        "a peer that was drained",
        "the leader logs 'lost', then 'has left'",
        "it has left",
        (
            "sim/test_standing:test_a_peer_that_leaves_is_never_shown_as_lost",
            "training/test_vitals:test_a_peer_that_had_said_so_has_left",
        ),
    ),
    Point(
        "the dead shown as living",
        "'training' and cover complete for 25 s",
        "silent or lost within seconds, and it covers no stage",
        (
            "sim/test_standing:test_a_peer_is_lost_for_all_before_its_record_expires",
            "config/test_peers_in_sight:"
            "test_a_peer_that_fell_silent_is_shown_so_and_covers_nothing",
            "control/test_text:test_peers_without_a_sign_of_life_cover_no_stage",
        ),
    ),
    Point(
        "a share that is negative",
        "'at most -0.0% of it can be saved'",
        "plain words without a sign",
        ("tools/test_schedule:test_what_other_paths_could_save_is_no_negative_number",),
    ),
    Point(
        "memory",
        "'435 MiB, planned at most 23.8 MiB', eight lines everywhere",
        "one line that counts the process; its parts with -v",
        (
            "control/test_text:test_status_shows_the_plan_of_memory",
            "cli/test_doctor:test_the_device_check_says_what_takes_the_memory",
        ),
    ),
    Point(
        "a full disk",
        "`doctor disk` advises chmod",
        "room is asked for; chmod only where a right is missing",
        (
            "cli/test_doctor:test_a_full_disk_is_freed_of_what_is_made_again",
            "cli/test_doctor:test_a_write_that_fails_is_answered_by_its_reason",
        ),
    ),
    Point(
        "a machine that slept",
        "nothing in its log",
        "status and log say for how long it stood still",
        ("config/test_timekeeping:test_a_process_that_wakes_says_so_and_compares_anew",),
    ),
    Point(
        "a leader that stands still",
        "'2 of 4 are here' although three lived; trained again after 48 s",
        "voters that live are counted at once",
        (
            "sim/test_frozen:test_a_frozen_leader_of_four",
            "sim/test_frozen:test_a_cell_commits_while_its_leader_is_frozen",
            "training/test_election:test_voters_that_have_lost_their_leader_show_it_together",
            "swarm/test_frozen:test_the_cell_goes_on_each_time_that_its_leader_stands_still",
        ),
    ),
    # ------------------------------------------------------------ crashes
    Point(
        "encodings",
        "UnicodeEncodeError in five commands; monitor with TERM=dumb: garbage",
        "a likeness of the same width; the monitor says what to use",
        (
            "cli/test_terminals:test_every_verb_is_readable_on_every_terminal",
            "cli/test_terminals:test_the_monitor_says_what_to_use_where_there_is_no_screen",
            "control/test_terminal:test_any_text_can_be_written",
        ),
    ),
    Point(
        "a pipe that closes",
        "`doctor | head`: 'unexpected error'",
        "the command ends quietly",
        ("cli/test_terminals:test_a_reader_that_has_gone_ends_a_command_quietly",),
    ),
    Point(
        "paths",
        "a comma in the home, a percent or hash in TMPDIR: nobody can be asked",
        "every path is dialled as it is",
        (
            "control/test_paths:test_a_daemon_can_be_asked_whatever_its_home_is_called",
            "control/test_paths:test_a_tunnel_is_dialled_whatever_tmpdir_is_called",
            "cli/test_names_of_files:test_a_run_is_made_checked_and_started_wherever_its_files_are",
        ),
    ),
    Point(
        "an export at a peer without the ends",
        "refused, with the advice to use an option that does not exist",
        "any peer exports; --tokenizer names a copy",
        (
            "control/test_export:test_a_block_stage_exports_a_run_with_its_own_tokenizer",
            "control/test_export:test_every_peer_writes_the_same_files",
            "cli/test_watch:test_export_passes_on_which_tokenizer",
        ),
    ),
    Point(
        "Ctrl-C in any verb",
        "SIGABRT, tracebacks, 'interrupted' while a drain goes on, a directory left by demo",
        "one line and 130, nothing left",
        (
            "cli/test_interrupted:test_a_verb_ends_in_order_at_any_moment",
            "cli/test_interrupted:test_one_while_the_engines_are_loaded",
            "cli/test_interrupted:test_a_demo_leaves_neither_daemons_nor_a_directory",
            "cli/test_interrupted:test_a_wait_for_the_daemon_says_what_goes_on",
        ),
    ),
    Point(
        "a stop that returns early",
        "the process is still there",
        "it returns when the process is gone, and says what it waits for",
        (
            "control/test_stop:test_a_daemon_is_gone_when_its_process_is",
            "control/test_stop:test_a_stop_that_takes_longer_says_what_it_waits_for",
        ),
    ),
    Point(
        "a wrong word",
        "`simulate --scenario nope` takes 3.1 s to refuse",
        "refused before anything is loaded",
        (
            "cli/test_verbs:test_a_wrong_word_is_refused_before_anything_is_loaded",
            "cli/test_verbs:test_the_refusals_load_nothing_heavy",
        ),
    ),
    # ------------------------------------------------------------ hard to read
    Point(
        "the monitor",
        "'22 mb here', 'TRAINING run/average/done'; at 80 x 24 no fifth peer, no leader",
        "words for people; who needs a look comes first, the others are counted",
        (
            "tui/test_monitor:test_it_says_micro_batches_the_share_done_and_the_time_left",
            "tui/test_monitor:test_a_crowd_shows_who_needs_a_look_and_counts_the_others",
            "control/test_text:test_phases_are_words_for_people",
        ),
    ),
    Point(
        "`peers` at 40 columns",
        "cut in the middle of words",
        "whole columns, fewer of them",
        ("control/test_text:test_the_peers_table_is_whole_in_any_terminal",),
    ),
    Point(
        "`doctor`",
        "silent for 4.8 s",
        "each check is shown as it ends",
        ("cli/test_doctor:test_each_check_is_shown_as_it_ends_and_a_slow_one_says_what_it_does",),
    ),
    Point(
        "output away from a terminal",
        "banner text and JSON lines in one file",
        "one format",
        (
            "config/test_telling:test_the_banner_is_text_where_the_log_is",
            "config/test_telling:test_the_banner_is_a_line_of_json_where_the_log_is",
            "telemetry/test_sinks:"
            "test_away_from_a_terminal_the_format_is_the_one_that_was_asked_for",
        ),
    ),
    Point(
        "slow text",
        "two tokens a second without a reason",
        "the reason is said",
        (
            "cli/test_watch:test_few_tokens_a_second_come_with_the_reason",
            "pipeline/test_forward_router:test_slow_text_has_its_reasons",
        ),
    ),
    Point(
        "the name of a run",
        "a run from one's own model is called 'demo'",
        "named by its model, shape or data",
        ("cli/test_validate:test_a_run_of_ones_own_is_not_called_demo",),
    ),
    Point(
        "a loss that rises at first",
        "without a word",
        "warm-up is said until it is over",
        ("control/test_text:test_warm_up_is_said_until_it_is_over",),
    ),
    # ------------------------------------------------------------ missed
    Point(
        "how long the run takes",
        "not said",
        "share done and time left, in status, monitor and log",
        (
            "control/test_text:test_status_says_how_long_the_run_will_take",
            "config/test_progress:test_the_last_ten_minutes_count",
        ),
    ),
    Point(
        "usual commands",
        "no --version, help, ps, restart, background start",
        "they are there",
        (
            "cli/test_verbs:test_the_version_is_found_by_any_of_its_names",
            "cli/test_verbs:test_help_of_everything_of_a_verb_and_of_a_verb_of_a_group",
            "cli/test_verbs:test_ps_lists_who_listens_and_the_own_home",
            "cli/test_verbs:test_restart_stops_waits_and_starts_with_the_same",
            "cli/test_verbs:test_a_start_in_the_background_returns_when_the_daemon_answers",
        ),
    ),
    Point(
        "defaults",
        "`swarm validate` and `id` ask for what is clear",
        "alone they take what is meant",
        (
            "cli/test_verbs:test_id_alone_shows_it",
            "cli/test_verbs:test_validate_alone_takes_the_manifest_that_is_meant",
        ),
    ),
    Point(
        "names and short ids",
        "only `ping` takes them; `peers` never shows a whole PeerId",
        "taken wherever a peer is meant; `peers -v` shows whole ones",
        (
            "control/test_naming:test_a_peer_is_meant_by_name_by_last_letters_and_by_all_of_them",
            "cli/test_verbs:test_a_peer_is_revoked_by_any_name",
            "cli/test_verbs:test_whole_peer_ids_can_be_copied",
        ),
    ),
    Point(
        "settings at `join`",
        "no --memory, --reserve, --threads",
        "every setting that `start` has",
        ("cli/test_verbs:test_join_has_every_setting_that_start_has",),
    ),
    Point(
        "an export's progress, card and modes",
        "silent, no card, files of two modes",
        "a line of progress, a model card, one mode",
        (
            "control/test_export_line:test_the_line_has_stages_bytes_rate_and_the_time_left",
            "control/test_model_card:test_the_head_is_what_the_hub_reads",
            "model/test_export:test_all_files_have_one_mode",
        ),
    ),
    Point(
        "status after a stop",
        "'not running'",
        "the last known status",
        ("cli/test_verbs:test_status_without_a_daemon_says_what_is_known",),
    ),
    Point(
        "an invite as a picture",
        "none",
        "a QR code that reads back as the invite",
        ("control/test_qr:test_the_drawing_is_the_code",),
    ),
)


def rows(report: Report, root: Path) -> None:
    """Row 5 for every point."""
    add(report, root, "5", POINTS)
