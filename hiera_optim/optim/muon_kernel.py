"""Momentum and packing before Newton–Schulz, and the weights' update after: two Triton kernels.

Their oracles are `pack_reference` and `apply_reference` in muon.py. Each is one launch over tiles of all
matrices, whatever their shapes, by a table; tall matrices are transposed on the way. Bytes an element, with
bfloat16 gradients and float32 masters: packing 12 (gradient 2, momentum 4 + 4, packed 2), applying 12
(update 2, master 4 + 4, weight 2).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiera_optim.optim.newton_schulz import Matrix, Plan

_TILE = 64
_WARPS = 8
# Columns of the matrix table.
_FIELDS = tl.constexpr(7)


@dataclass(frozen=True)
class Tables:
    """What the kernels look up.

    matrices: [n, 7] int64: offset, rows, cols, transposed, place in the own chunk (-1: another rank's),
        place in the exchange, row length of both places.
    factors: [n] float32, what multiplies the learning rate.
    tiles: [tiles, 3] int32: matrix, first row, first column.
    aligned: all offsets and lengths are multiples of 8.
    """

    matrices: Tensor
    factors: Tensor
    tiles: Tensor
    aligned: bool


def make_tables(
    matrices: Sequence[Matrix], plan: Plan, rank: int, factors: Sequence[float], device: torch.device
) -> Tables:
    """Tables of `plan` as `rank` needs them, on the device."""
    rows, tiles = [], []
    for i, (matrix, place) in enumerate(zip(matrices, plan.placements, strict=True)):
        own = place.start if place.rank == rank else -1
        there = place.rank * plan.chunk + place.start
        rows.append([matrix.offset, matrix.rows, matrix.cols, int(matrix.transposed), own, there, place.width])
        tiles += [[i, row, col] for row in range(0, matrix.rows, _TILE) for col in range(0, matrix.cols, _TILE)]
    aligned = all(m.offset % 8 == 0 and m.rows % 8 == 0 and m.cols % 8 == 0 for m in matrices)
    return Tables(
        torch.tensor(rows, dtype=torch.int64, device=device).view(-1, _FIELDS.value),
        torch.tensor(factors, dtype=torch.float32, device=device),
        torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3),
        aligned,
    )


@triton.jit
def _look_up(matrices_ptr, tiles_ptr, ALIGNED: tl.constexpr):
    """Matrix, its fields, and the first row and column of this program's tile."""
    tile = tiles_ptr + tl.program_id(0) * 3
    matrix = tl.load(tile)
    row, col = tl.load(tile + 1), tl.load(tile + 2)
    fields = matrices_ptr + matrix * _FIELDS
    offset = tl.load(fields)
    rows, cols = tl.load(fields + 1).to(tl.int32), tl.load(fields + 2).to(tl.int32)
    width = tl.load(fields + 6).to(tl.int32)
    if ALIGNED:
        row, col = tl.multiple_of(row, 8), tl.multiple_of(col, 8)
        offset, width = tl.multiple_of(offset, 8), tl.multiple_of(width, 8)
        rows, cols = tl.multiple_of(rows, 8), tl.multiple_of(cols, 8)
    return matrix, fields, row, col, offset, rows, cols, width


@triton.jit
def muon_pack_kernel(
    grad_ptr,
    momentum_ptr,
    packed_ptr,
    grad_scale_ptr,
    matrices_ptr,
    tiles_ptr,
    BETA: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ZERO_GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    _, fields, row, col, offset, rows, cols, width = _look_up(matrices_ptr, tiles_ptr, ALIGNED)
    place = tl.load(fields + 4)
    r, c = row + tl.arange(0, TILE), col + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    at = r[:, None] * cols + c[None, :]

    g = tl.load(grad_ptr + offset + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(momentum_ptr + offset + at, mask=inside, other=0.0)
    if ZERO_GRAD:
        tl.store(grad_ptr + offset + at, tl.zeros_like(g).to(grad_ptr.dtype.element_ty), mask=inside)
    if HAS_SCALE:
        g *= tl.load(grad_scale_ptr)
    m += (1.0 - BETA) * (g - m)
    tl.store(momentum_ptr + offset + at, m, mask=inside)
    u = m
    if NESTEROV:
        u = g + BETA * (m - g)
    u = u.to(packed_ptr.dtype.element_ty)

    if place >= 0:
        if ALIGNED:
            place = tl.multiple_of(place, 8)
        if tl.load(fields + 3) == 0:
            tl.store(packed_ptr + place + r[:, None] * width + c[None, :], u, mask=inside)
        else:
            turned = (c < cols)[:, None] & (r < rows)[None, :]
            tl.store(packed_ptr + place + c[:, None] * width + r[None, :], tl.trans(u), mask=turned)


@triton.jit
def muon_apply_kernel(
    param_ptr,
    master_ptr,
    exchange_ptr,
    lr_ptr,
    factors_ptr,
    matrices_ptr,
    tiles_ptr,
    weight_decay,
    HAS_MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    matrix, fields, row, col, offset, rows, cols, width = _look_up(matrices_ptr, tiles_ptr, ALIGNED)
    place = tl.load(fields + 5)
    if ALIGNED:
        place = tl.multiple_of(place, 8)
    lr = tl.load(lr_ptr)
    factor = lr * tl.load(factors_ptr + matrix)
    r, c = row + tl.arange(0, TILE), col + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    at = r[:, None] * cols + c[None, :]

    if tl.load(fields + 3) == 0:
        u = tl.load(exchange_ptr + place + r[:, None] * width + c[None, :], mask=inside, other=0.0)
    else:
        turned = (c < cols)[:, None] & (r < rows)[None, :]
        u = tl.trans(tl.load(exchange_ptr + place + c[:, None] * width + r[None, :], mask=turned, other=0.0))
    if HAS_MASTER:
        w = tl.load(master_ptr + offset + at, mask=inside, other=0.0)
    else:
        w = tl.load(param_ptr + offset + at, mask=inside, other=0.0).to(tl.float32)
    w = w * (1.0 - lr * weight_decay) - factor * u.to(tl.float32)
    if HAS_MASTER:
        tl.store(master_ptr + offset + at, w, mask=inside)
    tl.store(param_ptr + offset + at, w.to(param_ptr.dtype.element_ty), mask=inside)


def pack_triton(
    grad: Tensor,
    momentum: Tensor,
    packed: Tensor,
    grad_scale: Tensor | None,
    tables: Tables,
    beta: float,
    nesterov: bool,
    zero_grad: bool,
) -> None:
    """`pack_reference` as one launch."""
    if len(tables.tiles):
        muon_pack_kernel[(len(tables.tiles),)](
            grad,
            momentum,
            packed,
            momentum if grad_scale is None else grad_scale,
            tables.matrices,
            tables.tiles,
            BETA=beta,
            NESTEROV=nesterov,
            HAS_SCALE=grad_scale is not None,
            ZERO_GRAD=zero_grad,
            ALIGNED=tables.aligned,
            TILE=_TILE,
            num_warps=_WARPS,
        )


def apply_triton(
    param: Tensor, master: Tensor | None, exchange: Tensor, lr: Tensor, tables: Tables, weight_decay: float
) -> None:
    """`apply_reference` as one launch."""
    if len(tables.tiles):
        muon_apply_kernel[(len(tables.tiles),)](
            param,
            param if master is None else master,
            exchange,
            lr,
            tables.factors,
            tables.matrices,
            tables.tiles,
            weight_decay,
            HAS_MASTER=master is not None,
            ALIGNED=tables.aligned,
            TILE=_TILE,
            num_warps=_WARPS,
        )
