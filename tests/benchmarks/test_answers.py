"""How fast commands answer, which those that fail do not."""

import sys

import pytest

from benchmarks.firsthour.answers import _seconds
from node.core.errors import ExitCode


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.DEGRADED])
def test_the_time_of_a_command_that_answers_is_told(code: ExitCode) -> None:
    assert _seconds([sys.executable, "-c", f"raise SystemExit({code:d})"]) > 0


@pytest.mark.parametrize("code", [ExitCode.UNEXPECTED, ExitCode.USAGE, ExitCode.NOT_RUNNING])
def test_a_command_that_fails_has_no_time(code: ExitCode) -> None:
    program = f"import sys; print('no daemon', file=sys.stderr); sys.exit({code:d})"
    with pytest.raises(RuntimeError, match=f"ended with {code:d}: no daemon"):
        _seconds([sys.executable, "-c", program])
