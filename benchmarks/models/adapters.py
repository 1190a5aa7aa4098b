"""LoRA on a frozen model: four daemons beside PEFT and torch's AdamW in one process, on the same
samples and from the same first adapters."""

from pathlib import Path

import peft
import torch
import transformers

from benchmarks.models.directories import PROMPT, SETTINGS, generated, judged, swarm
from benchmarks.report import Report
from benchmarks.soak import scraped
from node.data.order import SampleOrder, Sampler
from node.data.sources import open_data
from node.manifest import Manifest
from node.model.shapes import MATRICES, all_shapes, count, parameter_shapes
from node.model.stages import build
from node.stage.text import Text
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Hang
from testbed.models.directories import made

STEPS = 50
RANK = 4
CLOSE = 1e-4
NODES = (1, 1, 2)
RUN = {
    **SETTINGS,
    "training.epochs": STEPS,
    "model.adapter": RANK,
    "model.adapter_alpha": 8.0,
    "model.adapter_targets": ",".join(MATRICES),
    "optimizer.adam_lr": 0.01,
    "optimizer.warmup": 0,
    "optimizer.decay": 0.0,
    "averaging.max_gradient_norm": 1e9,
}


def rows(report: Report, root: Path) -> None:
    """Losses, bytes, and the exported adapters."""
    torch.set_num_threads(1)
    there = made("llama", root / "hf")
    box = swarm(root / "run", there, RUN, NODES)
    try:
        live = {
            int(t.get("epoch")): float(t.get("loss"))
            for t in box.made["ends-0"].told()
            if t.kind == COMMITTED
        }
        drawn, chances = generated(box)
        out = root / "adapters"
        done = box.tutti("export", str(out), home="ends-0")
        if done.returncode:
            raise Hang(f"no export: {done.stderr}")
        moved = averaged(box)
    finally:
        box.clean_up()
    alone = by_peft(box.manifest, there, root)
    worst = max(abs(live[e + 1] - loss) for e, loss in enumerate(alone))
    report.add(
        f"2 largest difference of the losses of {STEPS} epochs of LoRA",
        worst,
        f"nats per token; from {live[1]:.4f} to {live[STEPS]:.4f}",
        "PEFT and torch's AdamW in one process",
        f"at most {CLOSE:g}",
        holds=worst <= CLOSE,
    )
    m = box.manifest.model
    stages = box.manifest.pipeline.stages
    trained = count(parameter_shapes(m, stages, stages))
    whole = count({n: s for n, s in all_shapes(m).items() if ".layers." in n}) * trained
    whole //= count(parameter_shapes(m, 1, 1))
    report.add(
        "2 bytes of a round that a replica of two sends",
        moved,
        "bytes an epoch",
        f"{4 * trained:,} bytes of adapters, {4 * whole:,} of the weights beside them",
        "",
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(there)
    loaded = peft.PeftModel.from_pretrained(base, str(out))
    apart = max(abs(a - b) for a, b in zip(chances, judged(loaded, drawn), strict=True))
    report.add(
        f"2 largest difference of {len(drawn)} log-probabilities after '{PROMPT}'",
        apart,
        "nats",
        "the exported adapters in PEFT",
        "at most 1e-05",
        holds=apart <= 1e-5,
    )


def averaged(box: Box) -> float:
    """Bytes that a replica of two sent to the other in an epoch."""
    sent = [
        scraped(box.made[label].status().metrics_url, "tutti_bytes_sent_total")["averaging"]
        for label in ("stage-2-0", "stage-2-1")
    ]
    return sum(sent) / len(sent) / STEPS


def by_peft(manifest: Manifest, there: Path, home: Path) -> list[float]:
    """The loss of every step. The first adapters are drawn as the stages draw them."""
    m = manifest.model
    p = manifest.pipeline
    t = manifest.training
    o = manifest.optimizer
    base = transformers.AutoModelForCausalLM.from_pretrained(there)
    config = peft.LoraConfig(
        r=m.adapter, lora_alpha=round(m.adapter_alpha), target_modules=list(m.adapter_targets)
    )
    model = peft.get_peft_model(base, config)
    ours = {
        f"base_model.model.{name}".replace(".weight", ".default.weight"): tensor
        for name, tensor in build(m, 1, 1).named_parameters()
    }
    mine = {n: q for n, q in model.named_parameters() if q.requires_grad}
    if mine.keys() != ours.keys():
        raise RuntimeError("PEFT names other adapters")
    for name, parameter in mine.items():
        parameter.data = ours[name].data.clone()
    adam = torch.optim.AdamW(
        mine.values(),
        lr=o.adam_lr,
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
        weight_decay=o.weight_decay,
    )
    corpus, _ = open_data(manifest.data, m.seq_len, m.vocab, home)
    text = Text(corpus, SampleOrder(corpus.windows, manifest.data.seed), p.micro_batch)
    sampler = Sampler()
    losses = list[float]()
    for _ in range(STEPS):
        adam.zero_grad()
        tokens, targets = text.at(sampler.take(t.target_batch))
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return losses
