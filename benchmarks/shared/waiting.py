"""Wait for a condition at other processes, which do not tell when it comes true."""

import time
from collections.abc import Callable
from typing import Any

from testbed.daemons.fleet import Hang

LOOK_S = 0.25
"""Seconds between two looks."""
MORE_S = 60.0
"""Seconds of waiting beyond those that are asked for: a late success is a figure too."""


def until(condition: Callable[[], Any], seconds: float, began: float) -> float:
    """Seconds since ``began`` when the condition held. Raises Hang :data:`MORE_S` after the seconds
    that are asked for."""
    while time.monotonic() - began < seconds + MORE_S:
        if condition():
            return time.monotonic() - began
        time.sleep(LOOK_S)
    raise Hang(f"not in {seconds + MORE_S:.0f} s")
