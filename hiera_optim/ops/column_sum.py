"""Sums over rows, deterministic: each program sums its own rows, a second kernel adds the programs' partial
sums.

No atomics, so the order of additions, and with it every bit of the result, is the same in each run on one
card.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hiera_optim.ops._launch import ceil_div, multiprocessors, require_contiguous, require_shape
from hiera_optim.ops.batched_sums import Segment, new_partials, take_sum

__all__ = ["column_sum", "column_sum_reference", "multiply_and_column_sum", "sum_partials"]

# Elements of the tile [rows of partial sums, columns] that one program of the finalizing kernel adds at a
# time.
FINALIZE_TILE = 8192


@triton.jit
def _sum_partials_kernel(partials_ptr, out_ptr, num_partials, width, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr):
    """out[w] = sum over p of partials[p, w]; a program owns BLOCK_W columns."""
    cols = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    col_ok = cols < width
    rows = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_P, BLOCK_W], tl.float32)
    for first in range(0, num_partials, BLOCK_P):
        ok = (first + rows < num_partials)[:, None] & col_ok[None, :]
        offsets = (first + rows).to(tl.int64)[:, None] * width + cols[None, :]
        total += tl.load(partials_ptr + offsets, mask=ok, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=col_ok)


@triton.jit
def _column_sum_kernel(
    x_ptr,
    factor_ptr,
    product_ptr,
    partials_ptr,
    num_rows,
    C: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """partials[program, c] = this program's rows of x (times factor, then also stored as product), summed."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    col_ok = (cols < C)[None, :]
    rows = tl.arange(0, BLOCK_R)
    offsets = rows[:, None] * C + cols[None, :]
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_rows, BLOCK_R), tl.num_programs(1), num_stages=STAGES):
        base = tl.cast(tile, tl.int64) * BLOCK_R * C
        ok = (rows < num_rows - tile * BLOCK_R)[:, None] & col_ok
        x = tl.load(x_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
        if MULTIPLY:
            x *= tl.load(factor_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
            rounded = x.to(product_ptr.dtype.element_ty)
            tl.store(product_ptr + base + offsets, rounded, mask=ok)
        total += x
    tl.store(partials_ptr + tl.program_id(1).to(tl.int64) * C + cols, tl.sum(total, 0), mask=cols < C)


def sum_partials(partials: torch.Tensor) -> torch.Tensor:
    """Add partial sums: fp32 [P, ...] -> fp32 [...], in a fixed order; inside `batched_sums`, when that ends."""
    require_contiguous(partials=partials)
    num_partials, width = partials.shape[0], partials[0].numel()
    later = take_sum(partials, width, (Segment(0, 0, width),))
    if later is not None:
        return later.view(partials.shape[1:])
    out = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    # One 32-byte sector a row where the sums are few (all loads in flight at once), wider where there are
    # many.
    block_w = 8 if width < 2048 else 32
    block_p = min(FINALIZE_TILE // block_w, max(16, triton.next_power_of_2(num_partials)))
    _sum_partials_kernel[(ceil_div(width, block_w),)](
        partials,
        out,
        num_partials,
        width,
        BLOCK_P=block_p,
        BLOCK_W=block_w,
        num_warps=8 if block_p * block_w >= 4096 else 4,
    )
    return out


def _column_block(columns: int) -> int:
    """The widest of 128, 64, 32 columns that divides `columns`, or 128 (masked) when none does."""
    return next((block for block in (128, 64, 32) if columns % block == 0), 128)


def _launch(
    x: torch.Tensor,
    factor: torch.Tensor | None,
    product: torch.Tensor | None,
    block_rows: int,
    block_columns: int | None,
    num_warps: int,
    num_stages: int,
    programs_per_multiprocessor: int,
) -> torch.Tensor:
    num_rows, columns = x.shape
    block_c = block_columns or _column_block(columns)
    column_blocks = ceil_div(columns, block_c)
    wanted = programs_per_multiprocessor * multiprocessors(x.device) // column_blocks
    row_programs = min(max(1, wanted), ceil_div(num_rows, block_rows))
    partials = new_partials(row_programs, columns, device=x.device)
    _column_sum_kernel[(column_blocks, row_programs)](
        x,
        x if factor is None else factor,
        x if product is None else product,
        partials,
        num_rows,
        C=columns,
        MULTIPLY=factor is not None,
        BLOCK_R=block_rows,
        BLOCK_C=block_c,
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return sum_partials(partials)


def column_sum(
    x: torch.Tensor,
    *,
    block_rows: int = 16,
    block_columns: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    programs_per_multiprocessor: int = 8,
) -> torch.Tensor:
    """Sum of [N, C] over its rows: fp32 [C], bitwise the same in every run on one card.

    The keyword arguments set block sizes and are there for the benchmark. Raises ValueError unless `x` is a
    contiguous matrix with at least one row.
    """
    if x.dim() != 2 or x.shape[0] == 0:
        raise ValueError(f"x must be a matrix with at least one row, got shape {tuple(x.shape)}")
    require_contiguous(x=x)
    return _launch(x, None, None, block_rows, block_columns, num_warps, num_stages, programs_per_multiprocessor)


def multiply_and_column_sum(
    x: torch.Tensor,
    factor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    block_rows: int = 16,
    block_columns: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    programs_per_multiprocessor: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x * factor (in x's dtype) and its column sum: ([N, C], fp32 [C]); `out` may be `x` itself.

    Raises ValueError for tensors that are not contiguous matrices of one shape.
    """
    if x.dim() != 2 or x.shape[0] == 0:
        raise ValueError(f"x must be a matrix with at least one row, got shape {tuple(x.shape)}")
    require_shape("factor", factor, tuple(x.shape))
    product = torch.empty_like(x) if out is None else out
    require_shape("out", product, tuple(x.shape))
    require_contiguous(x=x, factor=factor, out=product)
    sums = _launch(x, factor, product, block_rows, block_columns, num_warps, num_stages, programs_per_multiprocessor)
    return product, sums


def column_sum_reference(x: torch.Tensor) -> torch.Tensor:
    """Plain PyTorch oracle of `column_sum`: fp32 [C], or float64 when `x` is float64."""
    return x.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
