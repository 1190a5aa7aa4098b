"""A Ctrl-C at a known instruction of a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = """
import os, signal, sys, threading
from node.core import interrupts
def press():
    signal.raise_signal(signal.SIGINT)
interrupts.install()
"""


def after(code: str, begin: str = START) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_a_command_ends_at_once_with_one_line():
    code = "try:\n    press()\nfinally:\n    print('too late')"
    assert after(code) == (130, "", "interrupted\n")


def test_what_must_be_taken_down_is():
    code = """
try:
    with interrupts.raising():
        try:
            press()
        finally:
            print("taken down", flush=True)
except KeyboardInterrupt:
    sys.exit(7)
"""
    assert after(code) == (7, "taken down\n", "")


def test_a_second_one_skips_the_clean_up():
    code = """
with interrupts.raising():
    try:
        press()
    finally:
        press()
        print("too late", flush=True)
"""
    assert after(code) == (130, "", "")


def test_a_group_and_the_program_in_it_stop_a_command_once():
    code = """
interrupts.install(signal.SIGTERM)
with interrupts.raising():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("taken down", flush=True)
        interrupts.TOGETHER_S = 0.0
        signal.raise_signal(signal.SIGTERM)
        print("too late", flush=True)
"""
    assert after(code) == (130, "taken down\n", "")


def test_what_must_not_be_left_half_done_is_finished():
    code = """
with interrupts.held():
    press()
    print("whole", flush=True)
print("too late", flush=True)
"""
    assert after(code) == (130, "whole\n", "interrupted\n")


@pytest.mark.parametrize("around", ["", "with interrupts.raising(): "])
def test_a_failure_of_what_is_held_hides_no_ctrl_c(around: str) -> None:
    code = f"""
def fails():
    with interrupts.held():
        press()
        raise OSError
try:
    {around}fails()
except OSError:
    print("too late", flush=True)
except KeyboardInterrupt:
    interrupts.leave()
"""
    assert after(code) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("before", "inside"), [("press()", "print('began', flush=True)"), ("pass", "press()")]
)
def test_a_block_that_raises_inside_one_that_holds(before, inside):
    """The clean-up of the outer block is whole, wherever the Ctrl-C comes."""
    code = f"""
try:
    with interrupts.held():
        try:
            {before}
            with interrupts.raising():
                {inside}
                print("too late", flush=True)
        finally:
            print("taken down", flush=True)
except KeyboardInterrupt:
    sys.exit(7)
"""
    assert after(code) == (7, "taken down\n", "")


def test_a_swallowed_one_is_delivered_again():
    code = """
class Swallows:
    def __del__(self):
        press()
with interrupts.raising():
    try:
        Swallows()
        threading.Event().wait(60)
        print("lost", flush=True)
    except KeyboardInterrupt:
        print("caught", flush=True)
"""
    assert after(code) == (0, "caught\n", "")


def test_the_last_words_are_those_of_the_command():
    code = """
with interrupts.telling("the drain goes on"):
    press()
"""
    assert after(code) == (130, "", "the drain goes on\n")


def test_a_signal_that_is_ignored_stays_ignored():
    begin = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + START
    assert after("press()\nprint('goes on')", begin) == (0, "goes on\n", "")


def test_one_that_comes_while_the_program_is_replaced_is_not_lost():
    code = f"""
interrupts.block()
press()
os.execv(sys.executable, [sys.executable, "-c", {START!r} + "print('too late', flush=True)"])
"""
    assert after(code) == (130, "", "interrupted\n")


def test_a_stop_waits_until_the_new_program_handles_it():
    then = """
import signal
signal.signal(signal.SIGTERM, lambda number, frame: print("ends in order", flush=True))
print("loaded", flush=True)
interrupts.unblock(signal.SIGTERM)
"""
    code = f"""
import signal
interrupts.block(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
os.execv(sys.executable, [sys.executable, "-c", {(START + then)!r}])
"""
    assert after(code) == (0, "loaded\nends in order\n", "")


def test_other_threads_change_nothing():
    code = """
inside, go_on = threading.Event(), threading.Event()
def elsewhere():
    with interrupts.held():
        inside.set()
        go_on.wait(60)
thread = threading.Thread(target=elsewhere, daemon=True)
thread.start()
inside.wait(60)
press()
"""
    assert after(code) == (130, "", "interrupted\n")


def test_the_exit_code_of_a_command_that_is_over_stays():
    code = """
interrupts.ignore()
press()
sys.exit(9)
"""
    assert after(code) == (9, "", "")
