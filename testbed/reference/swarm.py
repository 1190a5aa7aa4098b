"""The swarm's plain twin: the unsplit model, one process, no network, the same samples, sums and
optimizer.

The swarm must compute the same, up to the order of fp32 additions; the golden test and the
benchmarks hold it to that.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from node.data.order import SampleOrder, Sampler
from node.data.settings import OWN_MANIFEST
from node.data.sources import open_data
from node.manifest import Manifest
from node.model.device import Device, Format
from node.model.pretrained import Weights
from node.optim.owner import Owner
from node.stage.text import Text
from node.wire.tensors import dtype_of
from testbed.reference.unsplit import Unsplit

CPU = Device(torch.device("cpu"))


@dataclass(frozen=True)
class Epoch:
    """One update: mean training loss before it (nats per token), tokens behind it, seconds it
    took."""

    epoch: int
    loss: float
    tokens: int
    seconds: float


class Reference:
    """Trains ``manifest`` alone. ``home`` is where tokenised files are cached, ``weights`` the
    directory of the model that it begins from, ``device`` where it computes, ``kind`` the number
    format of forward and backward, the usual one of the device where None."""

    def __init__(
        self,
        manifest: Manifest,
        home: Path,
        weights: Path | None = None,
        device: Device = CPU,
        kind: Format | None = None,
    ) -> None:
        m = manifest.model
        p = manifest.pipeline
        t = manifest.training
        corpus, _ = open_data(manifest.data, m.seq_len, m.vocab, home, OWN_MANIFEST)
        self.manifest = manifest
        parameters = manifest.optimizer.parameters
        self.model = Unsplit(m).to(dtype_of(parameters))
        self._autocast = partial(device.autocast, parameters)
        if kind is not None:
            self._autocast = partial(device.computing_in, kind)
        if weights is not None:
            files = Weights(weights, parameters)
            given = {n: t for s in (0, 1) for n, t in files.stage(m, 1, s).items()}
            missing = self.model.load_state_dict(given, strict=not m.adapter).missing_keys
            if any(".lora_" not in name for name in missing):
                raise ValueError(f"{weights} lacks {missing}")
        self.device = device
        self.model.to(device.device)
        self.text = Text(corpus, SampleOrder(corpus.windows, manifest.data.seed), p.micro_batch)
        self._sampler = Sampler()
        self.owner = Owner(manifest.optimizer, t.epochs)
        self._next = 0

    def train(self, epochs: int) -> Iterator[Epoch]:
        """``epochs`` more updates, one at a time."""
        size = self.manifest.pipeline.micro_batch
        batch = self.manifest.training.target_batch
        for _ in range(epochs):
            began = time.perf_counter()
            loss_sum = 0.0
            tokens = 0
            sums = dict[str, Tensor]()
            for _ in range(batch // size):
                self.model.zero_grad(set_to_none=True)
                tokens_BT, targets_BT = self._here(self.text.at(self._sampler.take(size)))
                with self._autocast():
                    loss, count = self.model.loss(tokens_BT, targets_BT)
                loss.backward()
                loss_sum = loss_sum + float(loss.detach())
                tokens = tokens + count
                for name, p in self.model.named_parameters():
                    if p.grad is not None:
                        sums[name] = p.grad.float() + sums[name] if name in sums else p.grad.float()
            self._step({name: total / tokens for name, total in sums.items()})
            self._next += 1
            self.device.synchronise()
            yield Epoch(self._next - 1, loss_sum / tokens, tokens, time.perf_counter() - began)

    def evaluate(self) -> float:
        """Nats per token on the same held-out batches as the swarm's evaluation."""
        count = min(self.manifest.training.eval_batches, self.text.held_out_count())
        with torch.no_grad(), self._autocast():
            batches = [self._here(self.text.held_out(i)) for i in range(count)]
            pairs = [self.model.loss(*batch) for batch in batches]
        return sum(float(loss) for loss, _ in pairs) / sum(n for _, n in pairs)

    def _here(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        return tokens.to(self.device.device), targets.to(self.device.device)

    @torch.no_grad()
    def _step(self, mean: Mapping[str, Tensor]) -> None:
        live = dict(self.model.named_parameters())
        for name, fresh in step_all(
            self.owner, {n: p.data for n, p in live.items()}, mean, self._next
        ).items():
            live[name].data = fresh


def step_all(
    owner: Owner, parameters: Mapping[str, Tensor], mean_gradients: Mapping[str, Tensor], epoch: int
) -> dict[str, Tensor]:
    """Step every parameter and commit: what one process that owns everything does in an epoch."""
    fresh = owner.step_parts(parameters, mean_gradients, epoch)
    owner.commit(epoch)
    return fresh
