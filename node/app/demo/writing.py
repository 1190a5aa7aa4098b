"""The text with which the model goes on from a fixed prompt, again and again while it trains."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from node.app.demo.daemons import DemoSwarm
from node.core.errors import LocalFault
from node.inference.sampling import Reached, SampleClock, SampleEnded, SamplingPace
from protos.control_pb2 import GenerateRequest

PROMPT = "The "
SHORT_TOKENS = 48
SAMPLES = 8
"""Samples of a run, the last one left out."""
PAUSE_S = 8.0
"""Least seconds between two samples."""
SHARE = 0.15
"""Most of the time that samples take."""
SAMPLE_S = 120.0
"""Longest time of a sample, after which it counts as failed."""
SLOWER = 3.0
"""Factor by which a text may be slower than the slowest sample so far, in seconds for each
token."""
UNKNOWN_TOKEN_S = 0.25
"""Seconds for each token while no sample has been measured."""
LEAST_S = 10.0
"""Least seconds of a wait for a text."""


@dataclass(frozen=True, slots=True)
class Written:
    """A text of the model, after ``epoch``."""

    epoch: int
    text: str


def request(tokens: int) -> GenerateRequest:
    """The prompt, with the same dice each time."""
    return GenerateRequest(prompt=PROMPT, max_tokens=tokens, temperature=0.7, seed=1, top_k=40)


class Writer:
    """Takes the samples, each in a thread of its own, so that nobody waits for them. A sample that
    fails is tried again later."""

    def __init__(self, swarm: DemoSwarm) -> None:
        self._swarm = swarm
        every = max(1, swarm.manifest.training.epochs // SAMPLES)
        self._clock = SampleClock(pace=SamplingPace(every, PAUSE_S, SHARE))
        self._lock = threading.Lock()
        self._written: list[Written] = []
        self._token_s = 0.0
        """Seconds for each token in the slowest sample so far."""
        self._thread: threading.Thread | None = None

    @property
    def written(self) -> list[Written]:
        """The samples so far, by epoch."""
        with self._lock:
            return list(self._written)

    def reached(self, epoch: int) -> None:
        """The run is at ``epoch``: take a sample if one is due."""
        with self._lock:
            due = self._clock.handle(Reached(epoch), time.monotonic())
        if not due:
            return
        # Here, not in the thread: only this one may look at the daemons.
        label = ""
        with suppress(LocalFault):
            label = self._swarm.chief()
        for sample in due:
            self._thread = threading.Thread(
                target=self._take, args=(sample.epoch, label), daemon=True
            )
            self._thread.start()

    def longest_s(self, tokens: int) -> float:
        """Longest wait for a text of this many tokens, by the samples so far."""
        with self._lock:
            each = self._token_s or UNKNOWN_TOKEN_S
        return max(LEAST_S, SLOWER * each * tokens)

    def wait(self, seconds: float) -> None:
        """Wait for the sample under way, at most ``seconds``."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _take(self, epoch: int, label: str) -> None:
        """Take a sample at the daemon with this label; "": none runs."""
        began = time.monotonic()
        text = ""
        if label:
            with suppress(LocalFault), self._swarm.client(label) as client:
                pieces = client.generate(request(SHORT_TOKENS), SAMPLE_S)
                text = "".join(piece.text for piece in pieces)
        now = time.monotonic()
        with self._lock:
            self._clock.handle(SampleEnded(now - began, bool(text)), now)
            if text:
                self._token_s = max(self._token_s, (now - began) / SHORT_TOKENS)
                self._written.append(Written(epoch, text))
