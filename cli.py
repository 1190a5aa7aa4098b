"""The application ``tutti``: its verbs under the headings of its help. A new verb is a function in
``node/commands`` and a line here."""

import sys
from collections.abc import Sequence

from node.commands import (
    about,
    daemon,
    data,
    demo,
    doctor,
    generate,
    ledger,
    model,
    plan,
    replay,
    simulate,
    start,
    status,
    swarm,
    web,
)
from node.commands.line import running
from node.commands.line.usage import PROGRAM, VerbGroup
from node.commands.owner import bugreport, identity, pause, service, settings

app = VerbGroup(
    PROGRAM,
    {
        "Run": (
            start.start,
            start.join,
            demo.demo,
            simulate.simulate,
            start.bootstrap,
            pause.pause,
            pause.resume,
            daemon.drain,
            daemon.stop,
            daemon.restart,
            service.service,
        ),
        "Watch": (
            status.status,
            status.ps,
            status.peers,
            status.cells,
            status.ping,
            status.monitor,
            web.web,
            status.logs,
            ledger.ledger,
            replay.replay,
            doctor.doctor,
            bugreport.bugreport,
        ),
        "Swarm owner": (
            data.data,
            swarm.swarm,
        ),
        "Model": (
            generate.generate,
            generate.chat,
            generate.serve,
            model.evaluate,
            plan.partition,
            plan.schedule,
            model.export,
        ),
        "About": (
            about.version,
            about.help_of,
            about.upgrade,
            settings.config,
            about.completion,
            identity.identity,
        ),
    },
    help="Train one language model together, peer to peer.",
    epilog="--home DIR, anywhere in the line: directory of this node's files (or TUTTI_HOME). "
    "--version, -V: as the verb version.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    return running.main(app, argv)


if __name__ == "__main__":
    sys.exit(main())
