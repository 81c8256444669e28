"""Max over groups of q consecutive rows, as q-pooling does it in window-major Z-order.

Ties go to the first row of the group, the rule of torch's `max(dim)`; a NaN wins over every number, as it
does there.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hiera_optim.ops._launch import ceil_div, require_contiguous, require_shape

__all__ = [
    "max_pool_backward",
    "max_pool_backward_reference",
    "max_pool_forward",
    "max_pool_forward_reference",
]

BLOCK_COLUMNS = 128
BLOCK_ROWS = 8


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    index_ptr,
    num_groups,
    Q: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = tl.program_id(0)
    ok = (rows < num_groups - tile * ROWS)[:, None] & (cols < C)[None, :]
    base = tile.to(tl.int64) * ROWS * C
    source = x_ptr + base * Q + rows[:, None] * (Q * C) + cols[None, :]
    best = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    index = tl.zeros([ROWS, BLOCK_C], tl.int32)
    for j in tl.static_range(1, Q):
        value = tl.load(source + j * C, mask=ok, other=0.0).to(tl.float32)
        # value != value: NaN. The comparison is strict, so of equal values the first stays.
        better = (value > best) | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        index = tl.where(better, j, index)
    target = base + rows[:, None] * C + cols[None, :]
    tl.store(y_ptr + target, best.to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(index_ptr + target, index.to(tl.uint8), mask=ok)


@triton.jit
def _backward_kernel(
    grad_y_ptr,
    index_ptr,
    grad_x_ptr,
    num_groups,
    Q: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = tl.program_id(0)
    ok = (rows < num_groups - tile * ROWS)[:, None] & (cols < C)[None, :]
    base = tile.to(tl.int64) * ROWS * C
    source = base + rows[:, None] * C + cols[None, :]
    grad = tl.load(grad_y_ptr + source, mask=ok, other=0.0)
    index = tl.load(index_ptr + source, mask=ok, other=0).to(tl.int32)
    target = grad_x_ptr + base * Q + rows[:, None] * (Q * C) + cols[None, :]
    for j in tl.static_range(0, Q):
        tl.store(target + j * C, tl.where(index == j, grad, 0.0).to(grad_x_ptr.dtype.element_ty), mask=ok)


def _check_group(q: int) -> None:
    if not 1 <= q <= 255:
        raise ValueError(f"q must be from 1 to 255, got {q}")


def max_pool_forward(x: torch.Tensor, q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Max of each q consecutive rows: x [N*q, C] -> (y [N, C] in x's dtype, index uint8 [N, C] in 0..q-1).

    Raises ValueError when the rows do not divide into groups of q.
    """
    _check_group(q)
    if x.dim() != 2 or x.shape[0] == 0 or x.shape[0] % q:
        raise ValueError(f"x of shape {tuple(x.shape)} has no whole groups of {q} rows")
    require_contiguous(x=x)
    groups, columns = x.shape[0] // q, x.shape[1]
    y = torch.empty(groups, columns, dtype=x.dtype, device=x.device)
    index = torch.empty(groups, columns, dtype=torch.uint8, device=x.device)
    grid = (ceil_div(groups, BLOCK_ROWS), ceil_div(columns, BLOCK_COLUMNS))
    _forward_kernel[grid](x, y, index, groups, Q=q, C=columns, ROWS=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS, num_warps=4)
    return y, index


def max_pool_backward(grad_y: torch.Tensor, index: torch.Tensor, q: int) -> torch.Tensor:
    """Gradient of `max_pool_forward`: grad_y [N, C], index uint8 [N, C] -> grad_x [N*q, C], every element
    written.

    Raises ValueError or TypeError for arguments that do not fit together.
    """
    _check_group(q)
    if grad_y.dim() != 2 or grad_y.shape[0] == 0:
        raise ValueError(f"grad_y must be a matrix with at least one row, got shape {tuple(grad_y.shape)}")
    if index.dtype != torch.uint8:
        raise TypeError(f"index must be uint8, got {index.dtype}")
    groups, columns = grad_y.shape
    require_shape("index", index, (groups, columns))
    require_contiguous(grad_y=grad_y, index=index)
    grad_x = torch.empty(groups * q, columns, dtype=grad_y.dtype, device=grad_y.device)
    grid = (ceil_div(groups, BLOCK_ROWS), ceil_div(columns, BLOCK_COLUMNS))
    _backward_kernel[grid](
        grad_y, index, grad_x, groups, Q=q, C=columns, ROWS=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS, num_warps=4
    )
    return grad_x


def max_pool_forward_reference(x: torch.Tensor, q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch oracle of `max_pool_forward`."""
    y, index = x.unflatten(0, (-1, q)).max(dim=1)
    return y, index.to(torch.uint8)


def max_pool_backward_reference(grad_y: torch.Tensor, index: torch.Tensor, q: int) -> torch.Tensor:
    """Plain PyTorch oracle of `max_pool_backward`."""
    grad_x = grad_y.new_zeros(grad_y.shape[0], q, grad_y.shape[1])
    return grad_x.scatter_(1, index.long()[:, None], grad_y[:, None]).flatten(0, 1)
