"""``tutti doctor``: runs the checks one after another and shows each as soon as it has ended.

Enters: the names of the checks. Leaves: lines for people or one document, and the exit code. Never:
a check itself (:mod:`node.app.checks`, :mod:`node.control.doctor`).
"""

import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from node.app import checks as local
from node.app import joining
from node.app.checks import DoctorCheck
from node.config import NodeConfig
from node.control import doctor as net
from node.control.client import ControlClient
from node.control.doctor import Checkup
from node.core.errors import ExitCode, LocalFault, NotRunning
from node.core.home import pasteable
from protos.control_pb2 import ReachReport

SLOW_S = 1.0
"""Seconds after which stderr says which check is running."""
_DOES = {
    "versions": "compares Python and the libraries with those that are needed",
    "device": "loads torch and looks at the device",
    "disk": "reads the home and its newest checkpoints",
    "data": "opens the data and the tokenizer, and compares their hashes",
    "service": "asks systemd for the service of this home",
    "clock": "asks the peers of the swarm, for ten seconds at most",
    "net": "asks the peers of the swarm, for ten seconds at most",
}
Show = Callable[[Sequence[str]], None]


@dataclass
class Report:
    """The outcome of the checks so far."""

    checks: list[DoctorCheck] = field(default_factory=list)
    checkup: Checkup | None = None
    """The answers of the swarm, once it was asked."""
    reach: ReachReport | None = None
    """Report on the ways by which others reach the daemon of this home, if one runs."""

    def code(self, net_wanted: bool) -> ExitCode:
        """The exit code of the first fault."""
        faults = (one.finding.exit_code for one in self.checks if not one.finding.ok)
        code = next(faults, ExitCode.OK)
        if not code and net_wanted and self.checkup is not None:
            return self.checkup.verdict.exit_code
        return code

    def net_document(self) -> dict[str, Any]:
        """The network's part as JSON-ready values."""
        document = {}
        if self.checkup is not None:
            document = net.checkup_document(self.checkup)
        if self.reach:
            document["daemon"] = net.daemon_document(self.reach)
        return document


def run(
    ours: NodeConfig,
    wanted: Sequence[str],
    places: Sequence[str],
    *,
    fix: bool,
    verbose: bool,
    as_json: bool,
    home_flag: str = "",
) -> int:
    """Run the checks and show them. A check that cannot run raises LocalFault if it is the only
    one; among others this is a finding. ``home_flag``: the home as the command line has named it,
    for commands in the advice."""
    report = Report()
    width = max(40, shutil.get_terminal_size().columns)
    for name in wanted:
        with _says_when_slow(name, quiet=as_json):
            found = _check(report, ours, name, places, fix=fix, alone=len(wanted) == 1)
        found = [_with_home(one, home_flag) for one in found]
        report.checks += found
        if not as_json:
            shown = local.lines(found, width, verbose)
            if name == "net":
                shown += _net_lines(report)
            _print(shown)
    code = report.code("net" in wanted)
    if as_json:
        _say_document(report, wanted, code)
    return code


def _check(
    report: Report,
    ours: NodeConfig,
    name: str,
    places: Sequence[str],
    *,
    fix: bool,
    alone: bool,
) -> list[DoctorCheck]:
    """The findings of one check; the network's are in ``report``."""
    try:
        if report.checkup is None and name in ("clock", "net"):  # one look at the swarm is for both
            report.checkup = joining.examined(ours, places)
        if name != "net":
            return local.run(name, ours, fix=fix, checkup=report.checkup)
        with contextlib.suppress(NotRunning):
            with ControlClient(ours.control_socket, home=ours.home) as client:
                report.reach = client.reach()
        if report.checkup is not None and report.reach is not None:
            report.checkup = net.beside_peers(report.checkup, report.reach)
        return []
    except LocalFault as e:
        if alone:
            raise
        return [local.blocked(name, e)]


def _with_home(check: DoctorCheck, home_flag: str) -> DoctorCheck:
    """The finding, with commands that name this home."""
    finding = check.finding
    fix = pasteable(finding.fix, home_flag)
    return replace(check, finding=replace(finding, fix=fix))


def _net_lines(report: Report) -> list[str]:
    checkup = []
    if report.checkup is not None:
        checkup = net.checkup_lines(report.checkup)
    if report.reach:
        checkup += net.daemon_lines(report.reach)
    return checkup


def _say_document(report: Report, wanted: Sequence[str], code: ExitCode) -> None:
    from node.control.commands import say_json

    document = report.net_document() if "net" in wanted else {}
    if list(wanted) != ["net"]:
        found = [one.document() for one in report.checks]
        document = {"checks": found, "net": document, "exit_code": int(code)}
    say_json(document)


@contextlib.contextmanager
def _says_when_slow(name: str, *, quiet: bool) -> Iterator[None]:
    """Name a check on stderr if it takes long."""
    timer = threading.Timer(SLOW_S, _say_does, (name,))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_does(name: str) -> None:
    print(f"…     {name:10}{_DOES[name]}", file=sys.stderr, flush=True)


def _print(lines: Sequence[str]) -> None:
    if lines:
        print("\n".join(lines), flush=True)
