"""The command ``tutti replay``: plays the recording of a daemon into fresh machines."""

import json
from pathlib import Path

from node.coordinator.recording import show
from node.coordinator.recording.chain import RecordingDamaged, lines_of
from node.coordinator.recording.player import Player
from node.core.errors import ExitCode, UsageFault
from node.telemetry.sinks import say


def run_command(path: Path, *, as_json: bool) -> int:
    """Play a recording and print the result. Returns DEGRADED if the actions differ. Raises
    RecordingDamaged for a file that is cut or changed, after the records before that were played;
    UsageFault for one that cannot be read."""
    player = Player()
    damage: RecordingDamaged | None = None
    try:
        with path.open("rb") as file:
            player.play(lines_of(file))
    except OSError as e:
        raise UsageFault(
            f"{path} cannot be read: {e.strerror or e}", "name a file of  tutti start --record"
        ) from e
    except RecordingDamaged as e:
        damage = e
    if as_json:
        text = show.document(player) | {"damage": str(damage) if damage else ""}
        say(json.dumps(text))
    elif player.played.records:
        say("\n".join(show.lines(player, damaged=damage is not None)))
    if damage is not None:
        raise damage
    if player.played.difference is not None:
        return ExitCode.DEGRADED
    return ExitCode.OK
