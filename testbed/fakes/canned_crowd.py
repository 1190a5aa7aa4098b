"""A canned daemon in a run of 200 peers in 12 cells, some with hostile names: for tests and
measurements of the page, and for trying its looks.

  python -m testbed.fakes.canned_crowd HOME [--small] [--still]

serves it at HOME/ctl.sock until it is ended. An epoch passes every two seconds, unless --still.
"""

import argparse
import asyncio
import math
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from node.control.service import ControlService
from node.core.home import control_socket
from node.core.version import VERSION
from protos import control_pb2 as pb
from protos.ask_pb2 import PeerLine, PeersAnswer, SwarmLine
from testbed.fakes.canned_window import ME, RUN, CannedWindow, training_snapshot

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\u202egnp.exe \x1b[31m\x00",
    "'\"`${alert(3)}",
    "__proto__",
    "a" * 500,
    "\n\ndata: {}\n\nevent: whole\n",
    "javascript:alert(4)",
)
"""Names by which a peer would like to do something in a browser."""
LETTERS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
STATES = ("training",) * 14 + ("joining", "silent", "draining", "moving")
PATHS = ("direct",) * 5 + ("mapped", "tunnel", "punched", "relayed", "relayed")
NAMES = ("brisk-otter", "golden-condor", "quiet-ferret", "sunny-stoat", "calm-heron", "lab-a100")
WORDS = "the sea was calm and the old man went on to the ship with his men "
"""Text of the canned model, with mistakes at the beginning."""


def peer_id(number: int) -> str:
    """A PeerId that no key has; 0 is this node's."""
    if number == 0:
        return ME
    tail = "".join(
        LETTERS[(number * step + step) % len(LETTERS)] for step in (1, 7, 13, 29, 31, 37)
    )
    return f"12D3Koo{number:05d}".replace("0", "A") + "B" * 33 + tail


def crowd(peers: int = 200, cells: int = 12, stages: int = 5) -> PeersAnswer:
    """Peers over the cells and stages in turn. Some stages have one working peer or none."""
    answer = PeersAnswer(
        swarm=SwarmLine(name="tiny-demo", run_id=RUN, epoch=120, epochs=400, stages=stages)
    )
    for n in range(peers):
        state = STATES[n * 7 % len(STATES)]
        path = PATHS[n * 3 % len(PATHS)]
        if n == 0:
            state = "training"
            path = "self"
        cell = ""
        if cells > 1:
            cell = f"{n % cells:x}{'c0ffee0ddba11aa'}"[:16]
        name = f"{NAMES[n % len(NAMES)]}-{n}"
        if n and n % 23 == 0:
            name = HOSTILE[n // 23 % len(HOSTILE)]
        stage = n // cells % (stages + 1)
        answer.peers.append(
            PeerLine(
                peer=peer_id(n),
                name=name,
                state=state,
                stage=stage,
                role="stage" if stage else "ends",
                path=path,
                via=peer_id(1) if path == "relayed" else "",
                rtt_s=0.01 + n % 50 / 200,
                tokens_per_s=400.0 + 37 * n,
                epoch=120,
                up_s=600.0 + 60 * n,
                version=VERSION,
                progress=0.62 if state == "joining" else 0.0,
                silent_s=17.0 if state == "silent" else 0.0,
                cell=cell,
                leads=n < cells,
            )
        )
    return answer


class CannedCrowd(CannedWindow):
    """A window of a run that goes on: :meth:`step` commits an epoch."""

    def __init__(self, peers: int = 200, cells: int = 12, stages: int = 5) -> None:
        super().__init__(training_snapshot(), crowd(peers, cells, stages))
        self.said.swarm.stages = stages
        self.said.swarm.epochs = 400
        self.said.loss_before = 5.56
        self.said.loss_val_before = 5.61
        own = self.seen.peers[0]
        self.said.name = own.name
        self.said.stage = own.stage
        self.said.layers = "embedding, head"
        self.said.replicas = sum(p.stage == 0 and p.cell == own.cell for p in self.seen.peers)
        del self.past.stage_bytes[:]
        self.past.stage_bytes.extend((2 + stage) << 30 for stage in range(stages + 1))
        for n, line in enumerate(self.seen.peers[:: max(1, peers // 60)]):
            self.past.work.add(
                peer=line.peer,
                name=line.name,
                stage=line.stage,
                micro_batches=4_000 - 60 * n,
                epochs=120 - n,
            )
        self._count_stages()

    def step(self) -> None:
        """One more epoch."""
        s = self.said
        s.epoch += 1
        s.swarm.epoch = s.epoch
        s.loss = 1.6 + 4 * math.exp(-s.epoch / 40)
        s.tokens += 343_333
        line = self.past.epochs.add(
            epoch=s.epoch, tokens=s.tokens, loss=s.loss, seconds=2.0 + s.epoch % 7 / 7, epochs=1
        )
        if s.epoch % 10 == 0:
            line.loss_val = s.loss_val = s.loss + 0.1
        if s.epoch % 30 == 0:
            line.repaired = 1
            self.journal.emit("training", "round-repaired", "stage 2 repeats its round", "warning")
        for work in self.past.work:
            work.micro_batches += 8
            work.epochs += 1
        self._count_stages()
        self.journal.emit(
            "training", "epoch-committed", f"epoch {s.epoch}/400 committed, loss {s.loss:.3f}"
        )

    def _count_stages(self) -> None:
        counted = Counter[int]()
        for work in self.past.work:
            counted[work.stage] += work.micro_batches
        for work in self.past.work:
            work.of_stage = counted[work.stage]

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.Piece]:
        """Words that are the more mistaken the higher the loss is."""
        wrong = max(0, int(40 * (self.said.loss - 1.7)))
        for i, letter in enumerate((WORDS * 5)[: 4 * request.max_tokens]):
            if (i * 7919 + self.said.epoch) % 100 < wrong:
                letter = LETTERS[i * 31 % len(LETTERS)].lower()
            yield pb.Piece(text=letter)
        yield pb.Piece(last=True, finish="length")


async def serve(home: Path, window: CannedCrowd, step_s: float) -> None:
    """Answer until SIGTERM or SIGINT."""
    window.said.home = str(home)
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    service = ControlService(window, control_socket(home))
    await service.start()
    while not end.is_set():
        try:
            async with asyncio.timeout(step_s or None):
                await end.wait()
        except TimeoutError:
            window.step()
    await service.close(0.0)


def main() -> None:
    """Serve a crowd."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--small", action="store_true", help="seven peers in one cell")
    parser.add_argument("--still", action="store_true", help="no epoch passes")
    asked = parser.parse_args()
    window = CannedCrowd()
    if asked.small:
        window = CannedCrowd(9, 1, 3)
    asked.home.mkdir(parents=True, exist_ok=True)
    step_s = 2.0
    if asked.still:
        step_s = 0.0
    asyncio.run(serve(asked.home, window, step_s))


if __name__ == "__main__":
    main()
