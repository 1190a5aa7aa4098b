"""Settings of the times at which this machine works for the swarm."""

from dataclasses import dataclass

from node.availability.hours import misread
from node.core.tables import setting, text_setting


@dataclass(frozen=True)
class AvailabilitySettings:
    """Settings of this peer; a manifest cannot change them. While one of these rules closes the
    machine, the daemon pauses: it holds no stage and its memory is given back."""

    idle_only: float = setting(
        0.0,
        "Minutes without a keyboard, a mouse, another program on the GPU and other load after "
        "which the machine counts as idle. The daemon works only while it is idle; 0: also while "
        "it is used.",
        least=0,
        most=24 * 60,
    )
    hours: str = text_setting(
        'Hours of the day, by the local clock, in which the daemon works: "22-07", or several such '
        'as "22:30-07,12-13"; empty: at any hour.',
        pattern=r"([0-9:,\s-]*)",
        says='spans of a day such as "22-07" or "22:30-07,12-13"',
        refused=misread,
    )
    max_load: float = setting(
        0.0,
        "Percent of this machine's cores that other programs may keep busy before the daemon "
        "pauses; 0 for no limit, or 25 where idle_only is set. Programs with a raised niceness do "
        "not count.",
        least=0,
        most=100,
    )
    leave_s: float = setting(
        10.0,
        "Seconds that the epoch under way and the hand-over may take when the daemon pauses; then "
        "it leaves at once, and others repeat its part of the epoch.",
        least=0,
        most=600,
    )
