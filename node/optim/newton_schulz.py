"""Orthogonalise matrices by a quintic Newton-Schulz iteration.

For X = U S V^T scaled to |X|_F <= 1, each step applies p(s) = a s + b s^3 + c s^5 to the singular
values. Five steps of the default coefficients bring every singular value above 2e-3 of the norm
into [0.68, 1.21], which is not 1. Muon needs no more. ``kernel_rule.py`` decides from a matrix's
shape how the products are made. The result does not depend on that except for rounding, in fp32
about 1e-5 of the norm.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from node.optim.gram import Step, gram, standard
from node.optim.gram import coefficients as coefficients_of
from node.optim.kernel_rule import CPU, CUDA, KernelChoice, KernelRule, way
from node.optim.scratch import empty
from node.optim.workers import spread

T = TypeVar("T")


class MatrixBatch(NamedTuple):
    """Matrices of one shape that are worked on together, as positions, and in which way."""

    members: list[int]
    way: KernelChoice
    apart: bool
    """True: in a thread of its own, beside other jobs; False: all threads work on it."""


EPS = 1e-7
"""Smallest norm divided by, so that a zero matrix stays zero."""
STACKED = 1 << 24
"""Elements stacked at once: bounds what a stack takes beside the matrices themselves."""
APART = 200_000_000
"""Rows x rows x columns of a matrix, rows the shorter side, from which it is worked in one thread
beside others: 512x2048, not 512x512. Below, the interpreter's lock lets two threads with short
calls wait for each other: 16 of 256x256 take 12.7 ms on two threads, 9.3 ms as one stack with
operations on both; 8 of 512x512 25.6 and 22.8."""


def newton_schulz(
    matrices: torch.Tensor,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    *,
    coefficients: str = "simple",
    use_gram: bool = False,
    panels: int = 0,
) -> torch.Tensor:
    """Approximately U V^T of each [..., m, n] matrix, computed and returned in ``dtype``,
    contiguous, without a gradient.

    A matrix with more rows than columns is worked on transposed: the products are of the smaller
    side. ``use_gram``, ``panels``: see ``gram.py``. Numbers that are not finite come out as such.
    """
    chosen = coefficients_of(coefficients, steps)
    x = (
        matrices.detach()
        .contiguous()
        .to(torch.promote_types(torch.promote_types(matrices.dtype, dtype), torch.float32))
    )
    return _iterate(x / norms(x).clamp_(min=EPS), dtype, chosen, use_gram, panels)


def norms(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norms of [..., m, n], as [..., 1, 1]."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


class Wide:
    """Normalised matrices of one shape on their way through the iteration: put one by one, iterated
    together, taken one by one.

    In memory of :func:`empty`, so within :func:`reuse` there is one at a time.
    """

    def __init__(self, count: int, like: torch.Tensor, chosen: KernelChoice) -> None:
        rows, cols = like.shape
        self._way = chosen
        self._tall = rows > cols
        kind = like.new_empty(0, dtype=_dtype(chosen))
        # Cast first, transpose then: strides choose the kernel, and with it the last bits;
        # transposing fp32 is slower.
        self._cast: torch.Tensor | None = None
        shape = (rows, cols)
        if self._tall:
            self._cast = empty("cast", like.shape, kind)
            shape = (cols, rows)
        if count == 1:
            self._x = empty("wide", shape, kind)
        else:
            self._x = empty("wide", (count, *shape), kind)
        self._rows = self._matrices()

    def put(self, i: int, matrix: torch.Tensor) -> None:
        """The ``i``-th matrix, fp32 of norm at most 1."""
        if self._cast is not None:
            matrix = self._cast.copy_(matrix).mT
        self._rows[i].copy_(matrix)

    def iterate(self, steps: int, coefficients: str) -> None:
        """Iterate on all matrices that were put."""
        chosen = coefficients_of(coefficients, steps)
        self._x = (gram if self._way.gram else standard)(self._x, chosen, self._way.panels)
        self._rows = self._matrices()

    def get(self, i: int, into: torch.Tensor) -> None:
        """The ``i``-th orthogonalised one, in fp32."""
        found = self._rows[i]
        if self._cast is not None:
            found = self._cast.copy_(found.mT)
        into.copy_(found)

    def _matrices(self) -> list[torch.Tensor]:
        """The matrices that are iterated together, as views."""
        if self._x.ndim == 2:
            return [self._x]
        return list(self._x.unbind())


def finish(
    x: torch.Tensor, size: torch.Tensor, chosen: KernelChoice, steps: int, coefficients: str
) -> torch.Tensor:
    """As :func:`newton_schulz`, for contiguous fp32 matrices with known norms; ``x`` and ``size``
    are overwritten.

    Inside :func:`reuse`, the next call overwrites the result as well.
    """
    x.div_(size.clamp_(min=EPS))
    return _iterate(
        x, _dtype(chosen), coefficients_of(coefficients, steps), chosen.gram, chosen.panels
    )


def _iterate(
    x: torch.Tensor, dtype: torch.dtype, steps: Sequence[Step], use_gram: bool, panels: int
) -> torch.Tensor:
    # Cast first, transpose then: strides choose the kernel, and with it the last bits; transposing
    # fp32 is slower.
    tall = x.size(-2) > x.size(-1)
    if x.dtype is not dtype:
        x = empty("cast", x.shape, x.new_empty(0, dtype=dtype)).copy_(x)
    if tall:
        x = empty("wide", x.mT.shape, x).copy_(x.mT)
    x = (gram if use_gram else standard)(x, steps, panels)
    if tall:
        return empty("tall", x.mT.shape, x).copy_(x.mT)
    return x


_followed: dict[str, KernelRule] = {"cpu": CPU, "cuda": CUDA}
"""By kind of device: a process steps on the processor, and on one GPU at most."""


def follow(rule: KernelRule, kind: str = "cpu") -> None:
    """From now on, steps on a kind of device are made by this rule in the whole process; before, by
    the one for a device without measurements."""
    _followed[kind] = rule


def followed(kind: str = "cpu") -> KernelRule:
    """The rule by which this process makes steps on a kind of device."""
    return _followed[kind]


def rule_of(device: torch.device) -> KernelRule:
    """The rule that is followed on a device."""
    if device.type == "cuda":
        return followed("cuda")
    return followed()


def newton_schulz_all(
    matrices: Sequence[torch.Tensor],
    steps: int,
    stack: bool,
    *,
    coefficients: str = "simple",
    rule: KernelRule | None = None,
) -> list[torch.Tensor]:
    """Each matrix orthogonalised, in order, in fp32 or bf16. ``stack``, ``rule``: see
    :func:`in_jobs`."""

    def act(job: MatrixBatch) -> Sequence[torch.Tensor]:
        x = matrices[job.members[0]]
        if len(job.members) > 1:
            x = torch.stack([matrices[i] for i in job.members])
        x = newton_schulz(
            x,
            steps,
            _dtype(job.way),
            coefficients=coefficients,
            use_gram=job.way.gram,
            panels=job.way.panels,
        )
        if len(job.members) > 1:
            return x.unbind()
        return [x]

    return in_jobs(matrices, act, stack, rule)


def in_jobs(
    matrices: Sequence[torch.Tensor],
    act: Callable[[MatrixBatch], Sequence[T]],
    stack: bool,
    rule: KernelRule | None = None,
) -> list[T]:
    """Call ``act`` for each job and return its results in the order of ``matrices``.

    With ``stack``, matrices of a shape that gains from it are in one job. Large ones are done side
    by side on all of torch's threads, in one job for each thread. Without ``stack``, every matrix
    is a job of all threads, one after the other. ``rule``: used instead of the rule for the kind of
    device.
    """
    threads = torch.get_num_threads()
    jobs = _jobs(matrices, stack, threads, rule)
    together = [job for job in jobs if not job.apart]
    # The longest first, so that none is left alone with a long one.
    apart = sorted(
        (job for job in jobs if job.apart),
        key=lambda job: -len(job.members) * _work(matrices[job.members[0]]),
    )
    outs = [act(job) for job in together]
    if apart:
        outs += spread([partial(act, job) for job in apart], threads, max(1, threads // len(apart)))
    done = {
        i: one
        for job, out in zip(together + apart, outs, strict=True)
        for i, one in zip(job.members, out, strict=True)
    }
    return [done[i] for i in range(len(matrices))]


def _jobs(
    matrices: Sequence[torch.Tensor], stack: bool, threads: int, rule: KernelRule | None
) -> list[MatrixBatch]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        groups.setdefault((matrix.shape, matrix.device, matrix.dtype), []).append(i)
    jobs: list[MatrixBatch] = []
    for members in groups.values():
        first = matrices[members[0]]
        chosen = way(first.size(0), first.size(1), rule or rule_of(first.device))
        apart = stack and first.device.type == "cpu" and _work(first) >= APART
        share = len(members)
        if apart:
            share = -(-len(members) // threads)
        many = 1
        if stack and chosen.stacked:
            many = max(1, min(share, STACKED // first.numel()))
        jobs += [
            MatrixBatch(members[start : start + many], chosen, apart)
            for start in range(0, len(members), many)
        ]
    return jobs


def _work(matrix: torch.Tensor) -> int:
    return min(matrix.shape) * matrix.numel()


def _dtype(chosen: KernelChoice) -> torch.dtype:
    if chosen.precision == "bf16":
        return torch.bfloat16
    return torch.float32
