"""Adds the partial sums of many kernels in one launch.

Every bias and norm gradient ends in a small kernel that adds up some hundred rows of partial sums: 140 launches of
3 us in a Base step. Inside `batched_sums` the producers take
their partial sums from one workspace, and one kernel adds all of
them when the context ends; what `sum_partials` returned is filled then, and not to be read before.

The layout of the workspace is learnt the first time a key is used, when every sum still runs by itself, and so in
another order of additions than later; in a capture nothing can be learnt, as that needs a copy from the host, and the
sums of an unknown key stay single.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiera_optim.ops._launch import outside_graph_pools

BLOCK_COLUMNS = 32  # one 128-byte line of fp32 a row
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Segment:
    """Columns [source, source + width) of one producer's partial sums go to [target, target + width) of its result."""

    source: int
    target: int
    width: int


@dataclass(frozen=True)
class Request:
    """One producer: its partial sums [rows, columns], and where their column sums go in a result of `out` elements."""

    rows: int
    columns: int
    out: int
    segments: tuple[Segment, ...]


@dataclass
class Batch:
    """Workspace of one key: the learnt requests, or the requests so far while learning."""

    requests: list[Request] = field(default_factory=list)
    learnt: bool = False
    table: Tensor | None = None
    # of the pass under way
    workspace: Tensor | None = None
    result: Tensor | None = None
    taken: int = 0
    used: int = 0
    given: int = 0

    def allocate(self, device: torch.device) -> None:
        """Room for one pass."""
        size = sum(_aligned(q.rows * q.columns) for q in self.requests)
        self.workspace = torch.empty(size, dtype=torch.float32, device=device)
        # zeros: a key's bias has no gradient, and no segment writes there
        self.result = torch.zeros(sum(_aligned(q.out) for q in self.requests), dtype=torch.float32, device=device)

    def launch(self) -> None:
        """Adds all partial sums of the pass."""
        assert self.table is not None
        _sum_segments_kernel[(len(self.table),)](
            self.workspace, self.result, self.table, BLOCK_R=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS, num_warps=4
        )


class _State(threading.local):
    """The batch under way: each device's backward runs in a thread of its own."""

    active: Batch | None = None


_batches: dict[Hashable, Batch] = {}
_state = _State()


@triton.jit
def _sum_segments_kernel(work_ptr, out_ptr, table_ptr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    entry = table_ptr + tl.program_id(0) * 5
    source, rows, stride = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    width, target = tl.load(entry + 3), tl.load(entry + 4)
    cols = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(0, rows, BLOCK_R):
        ok = (first + r < rows)[:, None] & (cols < width)[None, :]
        total += tl.load(work_ptr + source + (first + r)[:, None] * stride + cols[None, :], mask=ok, other=0.0)
    tl.store(out_ptr + target + cols, tl.sum(total, 0), mask=cols < width)


def _aligned(n: int) -> int:
    return -(-n // 64) * 64


def _table(requests: list[Request], device: torch.device) -> Tensor:
    """[programs, 5] int64: first element, rows, row stride, columns and target of each program."""
    entries: list[tuple[int, int, int, int, int]] = []
    base = target = 0
    for q in requests:
        for s in q.segments:
            for c in range(0, s.width, BLOCK_COLUMNS):
                width = min(BLOCK_COLUMNS, s.width - c)
                entries.append((base + s.source + c, q.rows, q.columns, width, target + s.target + c))
        base += _aligned(q.rows * q.columns)
        target += _aligned(q.out)
    return outside_graph_pools(lambda: torch.tensor(entries, dtype=torch.int64, device=device), device)


@contextmanager
def batched_sums(key: Hashable, device: torch.device) -> Iterator[None]:
    """Sums asked for inside are all added when the context ends.

    Args:
        key: names the sequence of producers; the same key must always mean the same sequence of shapes.
    """
    if _state.active is not None:
        raise RuntimeError("batched_sums cannot be nested")
    batch = _batches.setdefault((key, device), Batch())
    if not batch.learnt and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        yield
        return
    if batch.learnt:
        batch.allocate(device)
    else:
        batch.requests.clear()
    batch.taken = batch.used = batch.given = 0
    _state.active = batch
    try:
        yield
        if not batch.learnt:
            batch.table, batch.learnt = _table(batch.requests, device), True
            # once for nothing: the next pass may be the one that is captured, and must find the kernel loaded
            batch.allocate(device)
            assert batch.workspace is not None
            batch.workspace.zero_()
        else:
            assert batch.taken == len(batch.requests), "fewer sums than the first time this key was used"
        batch.launch()
    finally:
        _state.active = None
        batch.workspace = batch.result = None


def new_partials(rows: int, *shape: int, device: torch.device) -> Tensor:
    """Room for partial sums, fp32 [rows, *shape]: from the workspace where one is active."""
    batch = _state.active
    if batch is None or not batch.learnt:
        return torch.empty(rows, *shape, dtype=torch.float32, device=device)
    size = rows * math.prod(shape)
    assert batch.workspace is not None
    partials = batch.workspace[batch.used : batch.used + size].view(rows, *shape)
    batch.used += _aligned(size)
    return partials


def take_sum(partials: Tensor, out: int, segments: tuple[Segment, ...]) -> Tensor | None:
    """The result [out] of summing `partials` [rows, ...] over rows, filled when the context ends.

    None where no context is active or it is still learning: the caller then sums by itself.
    """
    batch = _state.active
    if batch is None:
        return None
    rows = partials.shape[0]
    request = Request(rows, partials.numel() // rows, out, segments)
    if not batch.learnt:
        batch.requests.append(request)
        return None
    assert batch.requests[batch.taken] == request, f"{request} where {batch.requests[batch.taken]} was before"
    assert batch.result is not None
    assert batch.workspace is not None
    end = batch.workspace.data_ptr() + 4 * batch.used
    assert partials.data_ptr() + 4 * _aligned(partials.numel()) == end, "partial sums must come from new_partials"
    result = batch.result[batch.given : batch.given + out]
    batch.taken += 1
    batch.given += _aligned(out)
    return result
