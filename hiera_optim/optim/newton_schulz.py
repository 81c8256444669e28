"""Orthogonalises many matrices at once: batches by shape, shares over ranks, the Newton–Schulz iteration.

Muon (Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces a momentum matrix U S
V^T by about U V^T, with five steps of a quintic iteration in bfloat16. Matrices of one shape go through it
as one batch; tall ones are transposed, and shapes that are close are padded with zeros to a common one,
which is exact: rows and columns of zeros stay zero and add nothing to the others.

A step costs 2r²c (X X^T) + 2r³ (its square) + 2r²c operations for a matrix r × c, r <= c. Hiera Base with its
decoder has 198 such matrices (qkv counted as three; 77.6 M elements): 1.02 TFLOP for five steps, 1.06
padded, in 7 batches and 105 matrix multiplications (unmerged: 15 and 225). By count, not by measurement, on
H200s:

    ranks   operations a rank   at 790 / 500 TFLOP/s   all-gather of bfloat16
    1       1.06 TFLOP          1.4 / 2.1 ms           none
    8       0.13 TFLOP          0.17 / 0.27 ms         171 MB, 0.4 ms at 400 GB/s

Beside these, all ranks pass over momentum and weights (24 bytes an element, 0.4 ms), and baddbmm first
copies its addend (4 bytes an element a step: 0.35 ms, divided by the ranks). AdamW on the same elements
takes 0.45 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of X <- a X + (b A + c A²) X with A = X X^T; singular values end at about 0.7 to 1.2."""

STEPS = 5

# Operations that one batch fewer is worth: about 18 launches, some 50 µs, at 500 TFLOP/s.
MERGE_FLOPS = 2.5e10

# Elements; rows and columns are padded to a multiple, for 16-byte accesses in bfloat16.
_MULTIPLE = 8
_BATCH_ALIGNMENT = 256


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix in a flat buffer; `offset` in elements."""

    offset: int
    rows: int
    cols: int

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.cols

    @property
    def transposed(self) -> bool:
        """Tall matrices are worked on transposed, since the iteration's Gram matrix is rows × rows."""
        return self.rows > self.cols


@dataclass(frozen=True)
class Batch:
    """[count, rows, cols] in a rank's chunk, from element `start` on."""

    start: int
    count: int
    rows: int
    cols: int

    def view(self, chunk: Tensor) -> Tensor:
        return chunk[self.start : self.start + self.count * self.rows * self.cols].view(
            self.count, self.rows, self.cols
        )


@dataclass(frozen=True)
class Placement:
    """Where a matrix is worked on: rank, first element in its chunk, and elements from row to row there."""

    rank: int
    start: int
    width: int


@dataclass(frozen=True)
class Plan:
    """Who works on what. `placements` are in the matrices' order; every rank computes the same plan."""

    chunk: int
    batches: list[list[Batch]]
    placements: list[Placement]


def flops(rows: int, cols: int, steps: int = STEPS) -> float:
    """Operations to orthogonalise one matrix."""
    rows, cols = min(rows, cols), max(rows, cols)
    return steps * (4.0 * rows * rows * cols + 2.0 * rows**3)


def make_plan(matrices: Sequence[Matrix], ranks: int, merge_flops: float = MERGE_FLOPS) -> Plan:
    """Batches matrices by padded shape and shares them over ranks, the costliest first to the least busy."""
    shapes = _padded_shapes(matrices, merge_flops)
    order = sorted(range(len(matrices)), key=lambda i: (-flops(*shapes[i]), shapes[i], i))
    load = [0.0] * ranks
    shares: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(ranks)]
    for i in order:
        rank = load.index(min(load))
        load[rank] += flops(*shapes[i])
        shares[rank].setdefault(shapes[i], []).append(i)

    placements: dict[int, Placement] = {}
    batches: list[list[Batch]] = []
    chunk = 0
    for rank, share in enumerate(shares):
        own: list[Batch] = []
        start = 0
        for (rows, cols), members in share.items():
            own.append(Batch(start, len(members), rows, cols))
            for k, i in enumerate(members):
                placements[i] = Placement(rank, start + k * rows * cols, cols)
            start += -(-len(members) * rows * cols // _BATCH_ALIGNMENT) * _BATCH_ALIGNMENT
        batches.append(own)
        chunk = max(chunk, start)
    return Plan(chunk, batches, [placements[i] for i in range(len(matrices))])


def _padded_shapes(matrices: Sequence[Matrix], merge_flops: float) -> list[tuple[int, int]]:
    """Shape (rows <= cols) at which each matrix is worked on."""

    def pad(n: int) -> int:
        return -(-n // _MULTIPLE) * _MULTIPLE

    own = [(pad(min(m.rows, m.cols)), pad(max(m.rows, m.cols))) for m in matrices]
    counts = {shape: own.count(shape) for shape in sorted(set(own))}
    target = {shape: shape for shape in counts}
    while True:
        # The pair of shapes that costs least to pad to a common one.
        candidates = []
        for first in counts:
            for second in counts:
                if first < second:
                    common = (max(first[0], second[0]), max(first[1], second[1]))
                    extra = sum(counts[s] * (flops(*common) - flops(*s)) for s in (first, second))
                    candidates.append((extra, first, second, common))
        if not candidates or min(candidates)[0] >= merge_flops:
            return [target[shape] for shape in own]
        _, first, second, common = min(candidates)
        total = counts.pop(first) + counts.pop(second)
        counts[common] = counts.get(common, 0) + total
        target = {shape: common if now in (first, second) else now for shape, now in target.items()}


def newton_schulz(x: Tensor, out: Tensor, workspace: Tensor, steps: int = STEPS, eps: float = 1e-7) -> None:
    """Orthogonalises the matrices of x [n, r, c], r <= c, into `out`; x is overwritten.

    Args:
        x, out: contiguous, one dtype; the result's singular values lie in about 0.7 to 1.2, those near 0
        less.
        workspace: at least 2 n r² elements of the same dtype.
        steps: iterations; with an even number x and out are exchanged once by a copy.
        eps: lower bound of the Frobenius norm that x is divided by.
    """
    n, rows, _ = x.shape
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x.div_(norm.clamp_min_(eps))
    if x.is_cuda:
        half = n * rows * rows
        gram, poly = (workspace[i * half : (i + 1) * half].view(n, rows, rows) for i in range(2))
        _iterate(x, out, gram, poly, steps)
    else:
        # One by one: the result of a matrix must not depend on the size of the batch, so that the number of
        # ranks cannot change a bit; batches gain nothing on a CPU.
        gram, poly = (workspace[i * rows * rows : (i + 1) * rows * rows].view(1, rows, rows) for i in range(2))
        for i in range(n):
            _iterate(x[i : i + 1], out[i : i + 1], gram, poly, steps)


def _iterate(x: Tensor, out: Tensor, gram: Tensor, poly: Tensor, steps: int) -> None:
    a, b, c = COEFFICIENTS
    source, target = x, out
    for _ in range(steps):
        torch.bmm(source, source.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        torch.baddbmm(source, poly, source, beta=a, out=target)
        source, target = target, source
    if source is not out:
        out.copy_(source)
