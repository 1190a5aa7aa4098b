"""How often peers send heartbeats to their leader, and the shortest times that they wait for each
other, in seconds.

Only numbers, so that the simulator uses the same ones. How much longer a wait is follows from
measurements: :mod:`node.core.patience` for answers, :mod:`node.training.leader.deadlines` for work.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0
"""Between two heartbeats to the leader. A peer that misses some (Waits.late_s) is probed, and
counts as dead if the probe is not answered either."""
ASK_AFTER = 0.6
"""Share of the silence that means death after which a silent peer is asked whether it lives."""
STANDS_S = 30.0
"""For an answer over a connection that stands: the transport's own probes are answered there by a
process that is alive, however busy it is, and end the connection of one that is not."""
CALM_AFTER_S, CALM_BEAT_S = 10.0, 4.0
"""After so many seconds in which nothing happened and nothing is new: the time between two
heartbeats then."""
BEAT_AT_MOST_S = 0.1
"""The shortest time between two heartbeats, however urgent the next one is."""
TICK_S = 0.25
"""Between two looks at the clock."""
TELL_TIMEOUT_S = 10.0
"""For a note whose receiver may have to load a checkpoint first, where there is no connection
yet."""
TELL_TRIES = 3
"""Attempts to tell the leader something that it must hear."""
PROBE_TIMEOUT_S = 1.5
"""For a sign of life over a new connection."""
REDIAL_TIMEOUT_S = 1.0
"""For a leader whose connection has just broken to answer over a new one."""
PROBE_WAYS_S, PROBE_AGAIN_S, PROBE_FAILED_S = 0.5, 120.0, 5.0
"""Between two checks of which connections to measure, between two measurements of one connection,
and after a measurement that failed."""
RECALL_FROM, RECALL_S = 4, 2.0
"""Peers that are asked, one after another, for the plan behind a version, and for one of them to
tell what it remembers."""
WAY_TIMEOUT_S, WAYS_AT_ONCE = 15.0, 4
"""For a way that may have to be found first (a relay, a punched hole), and how many are measured at
the same time."""
MOST_WAYS = 64
"""Peers to which a way is measured and told."""
SEARCH_S = 0.3
"""CPU that the leader may spend on better paths for the next epoch, in a thread."""
ACCUSE_EVERY_S = 0.5
"""One peer is accused at most so often."""
