"""Program of the tests: forks ranks that step matrices together, and writes each rank's results.

    python forked.py FOLDER

Each rank writes its results to FOLDER/<ranks>-<rank>.json.
"""

import json
import multiprocessing
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size  # pyright: ignore

import node.model.stages as stages
from node.core.errors import DeviceLost, LocalFault
from node.local.groups import Sharded
from node.local.program import Program
from node.local.rank import Rank
from node.local.step import TensorParallelStep
from node.model.device import Device
from node.model.settings import ModelSettings
from node.model.weight_copies import NO_COPIES
from node.optim.muon import muon_direction
from node.optim.newton_schulz import newton_schulz_all
from node.optim.settings import OptimSettings

STEPS = 5
TIMEOUT_S = 300.0
MODEL = ModelSettings(layers=1, d_model=16, heads=4, kv_heads=4, d_ff=32, vocab=61, seq_len=8)


def even(ranks: int) -> list[Sharded]:
    """Twenty-one matrices, cut by rows and by columns."""
    shapes = [
        (32, 64, 0),
        (64, 32, 1),
        (16, 16, 0),
        (64, 64, 1),
        (48, 32, 0),
        (32, 32, 1),
        (8, 64, 1),
    ]
    return [
        Sharded(f"m{i}", r, c, d, ((r, c)[d] // ranks,) * ranks)
        for i, (r, c, d) in enumerate(3 * shapes)
    ]


def uneven(ranks: int) -> list[Sharded]:
    """Shards of all sizes, some empty."""
    first = (5, *((1,) * (ranks - 2)), 0)
    return [
        Sharded("first", sum(first), 24, 0, first),
        Sharded("last", 12, 31, 1, (*((0,) * (ranks - 1)), 31)),
        Sharded(
            "falling",
            10 * ranks,
            8,
            0,
            tuple(10 + (1 if r == 0 else -1 if r == ranks - 1 else 0) for r in range(ranks)),
        ),
    ]


def scenes(ranks: int) -> dict[str, tuple[list[Sharded], dict]]:
    one = [Sharded("only", 40, 24, 0, (40 // ranks,) * ranks)]
    small = {"most_bytes": 10_000}
    return {
        "even": (even(ranks), small),
        "serial": (even(ranks), {**small, "overlap": False}),
        "one-group": (even(ranks), {}),
        "uneven": (uneven(ranks), {"most_bytes": 4000}),
        "few": (one, {}),
        "large": ([*one, *even(ranks)], {"most_bytes": 100}),
    }


def wholes(matrices: list[Sharded], seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {m.name: torch.randn(m.rows, m.cols, generator=dice) for m in matrices}


def shard(m: Sharded, whole: Tensor, rank: int) -> Tensor:
    return whole.split(list(m.sizes), m.dim)[rank]


def stepped(step: TensorParallelStep, shards: dict[str, Tensor]) -> dict[str, Tensor]:
    got: dict[str, Tensor] = {}
    step.run(shards, lambda name, update: got.update({name: update.clone()}))
    return got


def alone(m: Sharded, whole: Tensor, rank: int) -> Tensor:
    """This rank's shard of the update that one process makes of the whole matrix."""
    return shard(m, newton_schulz_all([whole], STEPS, False)[0].float(), rank)


def training(here: Rank) -> float:
    """Take five steps of Muon's direction, orthogonalised together, with momentum in the shards.

    Returns the largest difference of the last update from the update of whole matrices.
    """
    matrices = even(here.size)
    settings = OptimSettings()
    step = TensorParallelStep(here, matrices, STEPS, most_bytes=10_000)
    momenta = {m.name: torch.zeros(m.shape(here.rank)) for m in matrices}
    kept = {m.name: torch.zeros(m.rows, m.cols) for m in matrices}
    got = dict[str, Tensor]()
    directions = dict[str, Tensor]()
    wanted = dict[str, Tensor]()
    for turn in range(5):
        for name, whole in wholes(matrices, 100 + turn).items():
            m = next(m for m in matrices if m.name == name)
            gradient = shard(m, whole, here.rank)
            directions[name], momenta[name] = muon_direction(settings, gradient, momenta[name])
            wanted[name], kept[name] = muon_direction(settings, whole, kept[name])
        got = stepped(step, directions)
    return max(
        float((got[m.name] - alone(m, wanted[m.name], here.rank)).abs().max()) for m in matrices
    )


def rank(number: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    here = Rank.meet(number, ranks, Device.pick("cpu"), folder / f"store-{ranks}", TIMEOUT_S)
    told: dict[str, object] = {}
    for scene, (matrices, options) in scenes(ranks).items():
        whole = wholes(matrices, 7)
        step = TensorParallelStep(here, matrices, STEPS, **options)
        for _ in range(2):  # the second turn uses the buffers again
            got = stepped(
                step, {m.name: shard(m, whole[m.name], number) for m in matrices if m.part(number)}
            )
        told[scene] = {
            "groups": len(step.groups),
            "buffer": sum(t.nbytes for pair in step._buffers for t in pair),
            "hosted": max(sum(4 * m.numel for m in g[number]) for g in step.groups),
            "given": max(sum(4 * m.part(number) for slot in g for m in slot) for g in step.groups),
            "missing": sorted({m.name for m in matrices if m.part(number)} ^ got.keys()),
            "off": [
                m.name
                for m in matrices
                if m.name in got and not torch.equal(got[m.name], alone(m, whole[m.name], number))
            ],
        }
    told["training"] = training(here)
    told["unwaited"] = unwaited(here)
    told["pieces"] = pieces(here)
    told["copies"] = copies(here)
    told["finite"] = [
        Program(here, MODEL, 1, 0)._finite([torch.tensor([bad if number == 1 else 1.0])])
        for bad in (1.0, float("nan"))
    ]
    (folder / f"{ranks}-{number}.json").write_text(json.dumps(told))
    Rank.leave()


def unwaited(here: Rank) -> int:
    """Number of collectives that torch still keeps after a look-up with a result that this rank
    does not use."""
    program = Program(here, MODEL, 1, 0)
    before = _get_work_registry_size()
    program.embed(torch.zeros(1, 8, dtype=torch.int64))
    return _get_work_registry_size() - before


def pieces(here: Rank) -> list[float]:
    """Errors of a loss taken in pieces of 5 tokens, against one device.

    Returns the loss's relative error, the largest error of the hidden states' gradient, 1.0 if the
    gradients were not finite, and the largest error of the head's gradient.
    """
    stages.LOGITS_AT_ONCE = 5 * MODEL.vocab
    program = Program(here, MODEL, 1, 0)
    alone = stages.Ends(MODEL)
    dice = torch.Generator().manual_seed(1)
    h = torch.randn(2, 8, 16, generator=dice).requires_grad_()
    targets = torch.randint(0, MODEL.vocab, (2, 8), generator=dice)
    loss = program.loss(h, targets)
    wanted, _ = alone.loss(h, targets)
    found, share, finite = program.gradients(loss, [h], None)
    dh, head = torch.autograd.grad(wanted, [h, alone.lm_head.weight])  # pyright: ignore
    whole = program.whole(share, ["lm_head.weight"])
    off = [
        (loss - wanted).abs() / wanted,
        (found[0] - dh).abs().max(),
        torch.tensor(float(not finite)),
    ]
    return [float(t) for t in off] + [float((t - head).abs().max()) for t in whole.values()]


class Halves(Device):
    """A device that computes in bf16 under autocast, as a GPU does."""

    def autocast(self, parameters: str = "fp32") -> AbstractContextManager[object]:
        return self.computing_in("bf16")


def copies(here: Rank) -> list[bool]:
    """Compare two programs in bf16, of which one keeps the copies of its weights, with the same
    parameters, then with others. True for each of output and gradients that is the same to the bit;
    last, True if the other parameters made another output, and if no copy of the former parameters
    is kept."""
    here = replace(here, device=Halves(torch.device("cpu")))
    whole = stages.build(MODEL, 1, 1)
    changed = {n: p.detach() * 1.5 for n, p in whole.named_parameters()}
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = []
    kept_now = 0
    for keeps in (False, True):
        program = Program(here, MODEL, 1, 1)
        if not keeps:
            for inner in program.module.modules():
                inner.copies = NO_COPIES  # pyright: ignore
        seen = []
        for number in range(4):
            if number == 2:
                program.load(changed if here.rank == 0 else None)
            output = program.forward(x, ())
            (dx,), share, _ = program.gradients(output, [x], torch.ones_like(output))
            seen.append({"output": output.detach(), "x": dx, **share})
        found.append(seen)
        kept_now = len([*program.module.copies])  # pyright: ignore
    plain, kept = found
    same = [torch.equal(a[name], b[name]) for a, b in zip(plain, kept, strict=True) for name in a]
    return [*same, not torch.equal(kept[1]["output"], kept[2]["output"]), kept_now == 7]


def dying(number: int, ranks: int, folder: Path) -> None:
    """Rank 1 ends without notice between two steps; the others must report it."""
    torch.set_num_threads(1)
    here = Rank.meet(number, ranks, Device.pick("cpu"), folder / "store-dying", TIMEOUT_S)
    matrices = even(ranks)
    whole = wholes(even(ranks), 7)
    step = TensorParallelStep(here, matrices, STEPS, most_bytes=10_000)
    shards = {m.name: shard(m, whole[m.name], number) for m in matrices}
    stepped(step, shards)
    if number == 1:
        os._exit(9)
    try:
        stepped(step, shards)
    except LocalFault as fault:
        said = {"lost": isinstance(fault, DeviceLost), "what": fault.what, "next": fault.next_step}
        (folder / f"dying-{number}.json").write_text(json.dumps(said))


def main() -> int:
    folder = Path(sys.argv[1])
    fork = multiprocessing.get_context("fork")
    codes = []
    for target, ranks in ((rank, 2), (rank, 4), (dying, 2)):
        processes = [fork.Process(target=target, args=(n, ranks, folder)) for n in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes.append([process.exitcode for process in processes])
    print(json.dumps(codes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
