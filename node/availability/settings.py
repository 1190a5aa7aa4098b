"""Settings of the times at which this machine works for the swarm."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AvailabilitySettings:
    """Settings of this peer; a manifest cannot change them. While one of these rules closes the
    machine, the daemon pauses: it holds no stage and its memory is given back."""

    idle_only: float = 0.0
    """Minutes without a keyboard, a mouse, another program on the GPU and other load after which
    the machine counts as idle. The daemon works only while it is idle; 0: also while it is used."""
    hours: str = ""
    """Hours of the day, by the local clock, in which the daemon works: "22-07", or several such as
    "22:30-07,12-13"; empty: at any hour."""
    max_load: float = 0.0
    """Percent of this machine's cores that other programs may keep busy before the daemon pauses;
    0 for no limit, or 25 where ``idle_only`` is set. Programs with a raised niceness do not
    count."""
    leave_s: float = 10.0
    """Seconds that the epoch under way and the hand-over may take when the daemon pauses; then it
    leaves at once, and others repeat its part of the epoch."""
