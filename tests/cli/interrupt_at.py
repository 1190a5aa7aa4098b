"""Run a command line again and again, each time with a Ctrl-C at another audit event.

    python interrupt_at.py FOLDER MILESTONES WORD...

MILESTONES is a list in JSON. Its entries are numbers of events, shares of all events (0.5), an
event's name and its count ("subprocess.Popen:2"), or a module about to be imported ("import
torch"). Events are those that the interpreter reports (a module imported, a file opened, a process
started), so that a milestone is the same moment on every machine. Prints a list in JSON: exit code,
stdout and stderr of each run. If shares are asked for, a run without a Ctrl-C comes first.
"""

import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from node.transport.parent_watch import end_with

Milestone = int | str


def main(folder: Path, milestones: list[int | float | str], words: list[str]) -> None:
    runs: list[Any] = []
    total = 0
    if any(isinstance(one, float) for one in milestones):
        runs.append(run(folder, 0, words))
        total = int((folder / "events").read_text(encoding="utf-8"))
    for one in milestones:
        at = max(1, round(one * total)) if isinstance(one, float) else one
        runs.append(run(folder, at, words))
    print(json.dumps(runs))


def run(folder: Path, at: Milestone, words: list[str]) -> tuple[int, str, str]:
    parent = os.getpid()
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [(folder / f"fd{n}").read_bytes().decode(errors="replace") for n in (1, 2)]
        return code, *said
    end_with(parent)
    for n in (1, 2):
        os.dup2(os.open(folder / f"fd{n}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), n)
    main_thread = threading.get_ident()
    seen = Counter[str]()

    def watch(event: str, about: tuple[Any, ...]) -> None:
        if threading.get_ident() == main_thread:
            seen[event] += 1
            names = [f"{event} {about[0]}"] if event == "import" else []
            if at in (seen.total(), f"{event}:{seen[event]}", *names):
                os.kill(os.getpid(), signal.SIGINT)

    import tutti

    tutti.interrupts.install()
    sys.addaudithook(watch)
    sys.argv[1:] = words
    code = tutti.main()
    (folder / "events").write_text(str(seen.total()), encoding="utf-8")
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
