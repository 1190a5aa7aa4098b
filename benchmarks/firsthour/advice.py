"""Advice after errors: every error text is provoked by a command of its own and its advice
followed, and each check of `tutti doctor` fails, passes, and mends what it can."""

import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from node.config import NodeConfig
from node.core.errors import ExitCode
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from testbed.daemons.fleet import Box
from testbed.daemons.told import without_home

PATIENCE_S = 300.0
"""For one command, which may load torch on a busy machine."""
HUGE = {
    "model.layers": 64,
    "model.d_model": 8192,
    "model.heads": 64,
    "model.kv_heads": 64,
    "model.d_ff": 32768,
    "pipeline.stages": 1,
}


def rows(report: Report, root: Path) -> None:
    """Rows of texts, then of checks."""
    box = Box(root)
    os.chdir(root)  # names in advice may have no directory
    try:
        texts(report, box)
        for sick in doctor_cases(box):
            examined(report, box, sick)
    finally:
        box.clean_up()


# ------------------------------------------------------------ texts


def texts(report: Report, box: Box) -> None:
    """Each sentence that sent a newcomer astray."""

    def said(
        name: str, words: str, code: int, has: str, never: str = "\0", home: str = "nobody"
    ) -> str:
        done = box.tutti(*shlex.split(words), home=home, timeout=PATIENCE_S)
        text = done.stdout + done.stderr
        flat = without_home(re.sub(r"\s+", " ", text))
        holds = done.returncode == code and has in flat and never not in flat
        report.add(
            f"5 text: {name}",
            done.returncode,
            "exit code",
            flat[:300],
            f"{code}, says {has!r}",
            holds=holds,
        )
        return text

    mine = box.root / "mine.toml"
    changed = box.root / "changed.toml"
    said("a fresh id show", "id show", 5, "tutti id new", "tutti start", home="fresh")
    said("and its advice", "id new", 0, "12D3Koo", home="fresh")
    said("swarm init", f"swarm init {mine}", 0, "tutti start")
    said("swarm init again", f"swarm init {mine}", 2, "mine-2.toml")
    said("swarm init --from FILE", f"swarm init --from {mine}", 0, "mine-2.toml")
    said("swarm init --from FILE again", f"swarm init --from {mine}", 0, "mine-3.toml")
    changed.write_text(mine.read_text().replace("# epochs = 120", "epochs = 121"))
    said(
        "an owner's changed manifest",
        f"swarm validate {changed}",
        5,
        "swarm init --from FILE",
        "ask the owner",
    )
    said("and its advice", f"swarm init --from {changed}", 0, "changed-2.toml")
    said(
        "somebody else's changed manifest",
        f"swarm validate {changed}",
        5,
        "ask the owner",
        home="other",
    )
    said(
        "model.hiden", "swarm init x.toml --set model.hiden=64", 2, "model.d_model", "model.tied ?"
    )
    said("model.layer", "swarm init x.toml --set model.layer=4", 2, "did you mean model.layers ?")
    said("mps", "start --device mps", 2, "auto, cpu, cuda or cuda:N")
    said("mps in the help", "start -h", 0, "auto, cpu, cuda:N.", "mps")
    said("an argument in the help", "start -h", 0, "Default: the swarm used last, else a solo one.")
    said("brackets in the help", "schedule -h", 0, '"delays_s": [[...]]')
    said("an unknown option", "start --nope", 2, "see tutti start -h")
    said("a missing word", "ping", 2, "see tutti ping -h")
    said("an unknown verb of a group", "swarm ini", 2, "see tutti swarm -h")
    with another_service() as port:
        place = f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.ephemeral().peer_id}"
        said(
            "another service answers",
            f"doctor net {place}",
            ExitCode.OTHER_SERVICE,
            "a web server answers there",
            "delimited",
        )
    settings = box.root / "sick" / "config.toml"
    settings.parent.mkdir()
    settings.write_text("x = = 3\n")
    text = said("settings that are no TOML", "id new", 2, "write it as in", "docs/", home="sick")
    settings.write_text("\n".join(line.strip() for line in text.splitlines()[2:]))
    said("and its advice", "id new", 0, "12D3Koo", home="sick")
    large = amended(Manifest.default_demo(), {"model.vocab": 1 << 20, "model.tied": False})
    ours = remembered(box, "large", large)
    text = said(
        "ends too big",
        f"--home {ours.home} doctor device --set role=ends --set memory=1GB",
        31,
        "--role stage",
        "more stages",
    )
    report.add(
        "5 text: ends too big, about stages",
        "pipeline.stages" in text,
        "",
        "",
        "False",
        holds="pipeline.stages" not in text,
    )


@contextmanager
def another_service() -> Iterator[int]:
    """A port where a web server answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    guest, _ = server.accept()
                except OSError:
                    return
                with guest:
                    guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


# ------------------------------------------------------------ doctor


@dataclass(frozen=True)
class Sick:
    """A check, the fault that is made for it, and whether `--fix` mends it."""

    check: str
    what: str
    code: int
    words: tuple[str, ...] = ()
    spoil: Callable[[NodeConfig], None] = lambda ours: None
    mends: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None


def doctor_cases(box: Box) -> list[Sick]:
    """Something wrong for every check."""
    other = box.root / "metadata" / "tutti-0.1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tutti\nVersion: 0.1.0\nRequires-Dist: numpy>=99\n"
    )
    demo = Manifest.default_demo()
    nowhere = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"

    def later(ours: NodeConfig) -> None:
        moment = time.time() + 7200
        os.utime(ours.identity_path, (moment, moment))

    def damaged(ours: NodeConfig) -> None:
        ours.identity_path.write_bytes(b"damaged")

    return [
        Sick(
            "versions",
            "a library too old",
            30,
            # The working directory is left out: in a checkout the real metadata lie there.
            environment={
                "PYTHONPATH": f"{other.parent}:{os.environ.get('PYTHONPATH', '')}",
                "PYTHONSAFEPATH": "1",
            },
        ),
        Sick("device", "no such GPU", 31, ("--set", "device=cuda:63")),
        Sick("device", "a run that does not fit", 31, ("--set", "memory=1MB")),
        Sick(
            "disk",
            "a key that others can read",
            32,
            spoil=lambda ours: ours.identity_path.chmod(0o644),
            mends=True,
        ),
        Sick("disk", "a damaged key", 32, spoil=damaged),
        Sick(
            "disk",
            "too little room for checkpoints",
            32,
            ("--set", "checkpoint.keep=1000"),
            manifest=amended(demo, HUGE),
        ),
        Sick(
            "data",
            "a file that is not there",
            33,
            manifest=amended(demo, {"data.source": "file:/nowhere/text.txt"}),
        ),
        Sick(
            "data",
            "another text than the run's",
            33,
            manifest=amended(demo, {"data.sha256": "ab" * 32}),
        ),
        Sick("clock", "behind what it has written", 26, spoil=later),
        Sick("net", "a port that is closed", 21, (nowhere,)),
    ]


def examined(report: Report, box: Box, sick: Sick) -> None:
    """The check on a sound home, on one that is spoilt, and with ``--fix``."""
    ours = remembered(box, re.sub(r"\W+", "-", sick.what), Manifest.default_demo())

    def doctor(*words: str) -> tuple[int, str]:
        done = box.tutti(
            "doctor",
            sick.check,
            *words,
            "--json",
            home=ours.home.name,
            timeout=PATIENCE_S,
            **environment,
        )
        found = json.loads(done.stdout)
        checks = found["checks"] if sick.check != "net" else [found["verdict"]]
        return done.returncode, "; ".join(
            f"{c['cause']} | {c['effect']} | {c['fix']}".strip(" |") for c in checks
        )[:300]

    environment: dict[str, Any] = {}
    code, said = doctor()
    report.add(
        f"5 doctor {sick.check} passes ({sick.what})", code, "exit code", said, "0", holds=code == 0
    )
    environment = sick.environment
    if sick.manifest is not None:
        remembered(box, ours.home.name, sick.manifest)
    sick.spoil(ours)
    code, said = doctor(*sick.words)
    holds = code == sick.code and said.count(" | ") >= 2
    report.add(
        f"5 doctor {sick.check} fails: {sick.what}",
        code,
        "exit code",
        said,
        str(sick.code),
        holds=holds,
    )
    if sick.mends:
        code, said = doctor(*sick.words, "--fix")
        report.add(
            f"5 doctor {sick.check} --fix: {sick.what}",
            code,
            "exit code",
            said,
            "0",
            holds=code == 0,
        )


def remembered(box: Box, name: str, manifest: Manifest) -> NodeConfig:
    """A home of this name that owns this swarm and used it last."""
    ours = NodeConfig.load({"home": box.root / name}, {})
    identity = Identity.load_or_create(ours.identity_path)
    ours.remember(Manifest.parse(manifest.owned_by(identity.peer_id).sign(identity)))
    return ours
