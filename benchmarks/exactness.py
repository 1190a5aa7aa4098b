"""Does a group of owners step as one process does, and how much state does each keep? Items 6 and
7.

    python -m benchmarks.exactness [--steps 50] [--json -]

Item 6: real owners, ownership and buddies' copies; state travels in the bytes it has on the wire.
After a third of the steps an owner dies and its parts go on from copies, after two thirds a peer
joins and takes parts over. The peer of each row is one process that owns everything, with the same
kernels in the same order; the last rows set it beside the optimizers of torch and of
pytorch-optimizer, which step all matrices in one object. Item 7: the fullest peer's state over
total / peers, as declared for Qwen3-0.6B, and as real owners hold it.
"""

import sys
from itertools import product
from typing import Any

import torch

from benchmarks.report import Report, command_line
from node.core.ids import PeerId
from node.optim.owner import Owner
from node.optim.ownership import assign, makespan
from node.optim.parts import parts_of
from node.optim.settings import OptimSettings
from testbed.models.owner_group import METHODS, SHAPES, STEPS, Group, compared, numbers, settings_of
from testbed.reference.qwen3 import MODELS, split_form
from testbed.reference.swarm import step_all

MOST_STATE = 1.1
BESIDE = {"muon": 1e-2, "shampoo": 1e-5, "soap": 1e-5, "adamw": 1e-6}
"""Largest difference in a number after all steps that is the same optimizer: torch's Muon iterates
in bf16, Shampoo's start vectors are drawn in another order, SOAP's factors have other strides,
torch's AdamW rounds its bias correction elsewhere."""


def exactness(report: Report, steps: int = STEPS) -> None:
    """Rows of item 6."""
    for method, parameters in product(METHODS, ("fp32", "bf16")):
        worst, group = compared(method, steps, parameters)
        holds = worst == 0 and group.lost == 0 and group.moved > 0
        what = (
            f"6 {method}, {parameters} parameters: largest difference after {steps} steps, one "
            f"owner died, one joined ({group.moved} parts moved)"
        )
        report.add(what, worst, "absolute", "one process", "0: bit for bit, no state lost", holds)
    for method in METHODS:
        far = beside_library(method, steps)
        most = BESIDE[method]
        where = "torch.optim" if method in ("muon", "adamw") else "pytorch-optimizer"
        what = f"6 {method}: largest difference from {where}'s after {steps} steps"
        report.add(
            what,
            far,
            "absolute",
            f"{where}, all matrices in one object",
            f"at most {most:g}",
            far <= most,
        )


def beside_library(method: str, steps: int = STEPS) -> float:
    """Largest difference of a matrix from what the library's own loop makes of it."""
    import pytorch_optimizer

    s = settings_of(method)
    names = [n for n, shape in SHAPES.items() if len(shape) == 2 and ".layers." in n]
    live = {name: torch.nn.Parameter(numbers(0)[name]) for name in names}
    each = list(live.values())
    match method:
        case "muon":
            theirs: Any = torch.optim.Muon(
                each, lr=s.lr, weight_decay=s.weight_decay, momentum=s.momentum
            )
        case "adamw":
            theirs = torch.optim.AdamW(
                each,
                lr=s.adam_lr,
                betas=(s.adam_beta1, s.adam_beta2),
                eps=s.adam_eps,
                weight_decay=s.weight_decay,
            )
        case "soap":
            betas = (s.momentum, s.adam_beta2)
            theirs = pytorch_optimizer.SOAP(
                each, lr=s.soap_lr, betas=betas, weight_decay=s.weight_decay
            )
        case _:
            theirs = pytorch_optimizer.ScalableShampoo(
                each,
                lr=s.shampoo_lr,
                betas=(s.momentum, s.adam_beta2),
                moving_average_for_momentum=True,
                weight_decay=s.weight_decay,
                decoupled_weight_decay=True,
                start_preconditioning_step=1,
                preconditioning_compute_steps=s.precondition_every,
                block_size=10_000,
                shape_interpretation=False,
                graft_type=4,
            )
    owner = Owner(s, 0)
    ours = {name: numbers(0)[name] for name in names}
    for epoch in range(steps):
        gradients = {name: g for name, g in numbers(epoch + 1, scale=0.01).items() if name in live}
        for name, p in live.items():
            p.grad = gradients[name].clone()
        theirs.step()
        ours = step_all(owner, ours, gradients, epoch)
    return max(float((ours[name] - live[name].detach()).abs().max()) for name in names)


def memory(report: Report) -> None:
    """Rows of item 7: equal peers, no buddies."""
    shapes = {f"model.layers.{m.name}.weight": (m.rows, m.cols) for m in split_form(MODELS["0.6B"])}
    shapes |= {
        f"model.layers.{layer:02}.{norm}.weight": (1024,)
        for layer in range(28)
        for norm in ("before", "after")
    }
    for method in METHODS:
        parts = parts_of(shapes, OptimSettings(name=method))
        total = sum(p.state for p in parts)
        cost = sum(p.cost for p in parts)
        for count in (4, 8, 16):
            members = [(PeerId(f"p{i:02}"), 1.0) for i in range(count)]
            owners = assign(parts, members)
            held = [sum(p.state for p in parts if owners[p.name] == peer) for peer, _ in members]
            ratio = max(held) * count / total
            late = makespan(parts, members, owners) * count / cost
            what = (
                f"7 {method}, layers of Qwen3-0.6B, {count} peers: fullest peer's state over "
                "total / peers"
            )
            note = f"total {total / 1e9:.2f} GB; slowest peer {late:.3f} x ideal"
            report.add(what, ratio, "ratio", note, f"at most {MOST_STATE}", ratio <= MOST_STATE)
    for method in METHODS:
        shapes = {
            f"model.layers.{i}.{n}": s
            for i in range(6)
            for n, s in {"q": (64, 64), "up": (160, 64), "down": (64, 160)}.items()
        }
        group = Group(settings_of(method), shapes, [PeerId(p) for p in "abcd"])
        group.epoch(numbers(0, shapes), numbers(1, shapes), 0)
        real = [
            sum(t.nbytes for n in owner.names() for t in owner.state(n).values())
            for owner in group.owners.values()
        ]
        ratio = max(real) * 4 / sum(real)
        declared = sum(p.state for p in group.parts)
        what = (
            f"7 {method}, real owners of 18 matrices, 4 peers: fullest peer's state over total "
            "/ peers"
        )
        note = f"{sum(real)} bytes held, {declared} declared"
        report.add(
            what,
            ratio,
            "ratio",
            note,
            f"at most {MOST_STATE}",
            ratio <= MOST_STATE and sum(real) == declared,
        )


def main() -> int:
    """Print every row; 0 when all hold."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report()
    exactness(report, args.steps)
    memory(report)
    return report.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
