"""Triton kernels of `hiera_optim.ops.linear_gelu`: one GEMM main loop, two epilogues.

Shape letters: N rows, K inner, F outer. Operands are pointers, or tensor descriptors where TMA is set.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from hiera_optim.ops.gelu import gelu_and_derivative

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _tile_position(tile, num_rows, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a linear index: columns within groups of GROUP row tiles, so that w stays in
    L2."""
    row_tiles = tl.cdiv(num_rows, BLOCK_N)
    in_group = GROUP * tl.cdiv(F, BLOCK_F)
    first = tile // in_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def _multiply(
    x,
    w,
    row,
    column,
    num_rows,
    K: tl.constexpr,
    F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    W_BY_COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_F] tile of x @ w.T (W_BY_COLUMNS: w is [F, K]) or x @ w (w is [K, F])."""
    total = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
    if TMA:
        for k in range(0, K, BLOCK_K):
            left = x.load([row, k])
            if W_BY_COLUMNS:
                total = tl.dot(left, w.load([column, k]).T, total)
            else:
                total = tl.dot(left, w.load([k, column]), total)
    else:
        # Rows past the end read the last row again: their results are not stored, and the loads need no mask.
        rows = tl.minimum(tl.cast(row, tl.int64) + tl.arange(0, BLOCK_N), num_rows - 1)
        columns = column + tl.arange(0, BLOCK_F)
        ks = tl.arange(0, BLOCK_K)
        x_tile = x + rows[:, None] * K + ks[None, :]
        if W_BY_COLUMNS:
            w_tile = w + columns[None, :] * K + ks[:, None]
        else:
            w_tile = w + ks[:, None] * F + columns[None, :]
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                left = tl.load(x_tile)
            else:
                left = tl.load(x_tile, mask=(ks < K - k)[None, :], other=0.0)
            if K % BLOCK_K == 0 and F % BLOCK_F == 0:
                right = tl.load(w_tile)
            else:
                right = tl.load(w_tile, mask=(ks < K - k)[:, None] & (columns < F)[None, :], other=0.0)
            # Operands of 16 bits ignore the precision; float32 ones must not be rounded to tf32.
            total = tl.dot(left, right, total, input_precision="ieee")
            x_tile += BLOCK_K
            w_tile += BLOCK_K if W_BY_COLUMNS else BLOCK_K * F
    return total


# Arguments are many and always the same, so calls stay on few lines.
# fmt: off


@triton.jit
def _offsets(row, column, num_rows, F: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """int64 offsets into [num_rows, F] of a tile, and which of them are inside."""
    rows = tl.cast(row, tl.int64) + tl.arange(0, BLOCK_N)
    columns = column + tl.arange(0, WIDTH)
    return rows[:, None] * F + columns[None, :], (rows < num_rows)[:, None] & (columns < F)[None, :]


@triton.jit
def _store(out, value, row, column, num_rows,
           F: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        out.store([row, column], value.to(out.dtype))
    else:
        offsets, inside = _offsets(row, column, num_rows, F, BLOCK_N, WIDTH)
        tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load(source, row, column, num_rows,
          F: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return source.load([row, column])
    else:  # noqa: RET505 - Triton compiles only the branch taken when both are spelled out
        offsets, inside = _offsets(row, column, num_rows, F, BLOCK_N, WIDTH)
        return tl.load(source + offsets, mask=inside, other=0.0)


@triton.jit
def _split_columns(tile, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr):
    """Left and right half of a tile's columns."""
    return tile.reshape(BLOCK_N, 2, BLOCK_F // 2).permute(0, 2, 1).split()


@triton.jit
def _forward_epilogue(h, bias, gelu_out, derivative_out, row, column, num_rows,
                      F: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
                      TMA: tl.constexpr, EXACT: tl.constexpr, HARDWARE: tl.constexpr):
    columns = column + tl.arange(0, WIDTH)
    h += tl.load(bias + columns, mask=columns < F, other=0.0).to(tl.float32)[None, :]
    gelu, derivative = gelu_and_derivative(h, EXACT, HARDWARE)
    _store(gelu_out, gelu, row, column, num_rows, F, BLOCK_N, WIDTH, TMA)
    _store(derivative_out, derivative, row, column, num_rows, F, BLOCK_N, WIDTH, TMA)


@triton.jit
def _forward_tile(x, w, bias, gelu_out, derivative_out, num_rows, tile,
                  K: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
                  BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, HALVES: tl.constexpr,
                  EXACT: tl.constexpr, HARDWARE: tl.constexpr):
    row_tile, column_tile = _tile_position(tile, num_rows, F, BLOCK_N, BLOCK_F, GROUP)
    row = row_tile * BLOCK_N
    column = column_tile * BLOCK_F
    h = _multiply(x, w, row, column, num_rows, K, F, BLOCK_N, BLOCK_F, BLOCK_K, True, TMA)
    if HALVES:
        W: tl.constexpr = BLOCK_F // 2
        left, right = _split_columns(h, BLOCK_N, BLOCK_F)
        _forward_epilogue(left, bias, gelu_out, derivative_out, row, column, num_rows,
                          F, BLOCK_N, W, TMA, EXACT, HARDWARE)
        _forward_epilogue(right, bias, gelu_out, derivative_out, row, column + W, num_rows,
                          F, BLOCK_N, W, TMA, EXACT, HARDWARE)
    else:
        _forward_epilogue(h, bias, gelu_out, derivative_out, row, column, num_rows,
                          F, BLOCK_N, BLOCK_F, TMA, EXACT, HARDWARE)


@triton.jit
def forward_kernel(x, w, bias, gelu_out, derivative_out, num_rows,
                   K: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
                   BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, HALVES: tl.constexpr,
                   PERSISTENT: tl.constexpr, EXACT: tl.constexpr, HARDWARE: tl.constexpr):
    """gelu_out, derivative_out [num_rows, F] = gelu and gelu' of x [num_rows, K] @ w [F, K].T + bias [F]."""
    if PERSISTENT:
        tiles = tl.cdiv(num_rows, BLOCK_N) * tl.cdiv(F, BLOCK_F)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=TMA):
            _forward_tile(x, w, bias, gelu_out, derivative_out, num_rows, tile,
                          K, F, BLOCK_N, BLOCK_F, BLOCK_K, GROUP, TMA, HALVES, EXACT, HARDWARE)
    else:
        _forward_tile(x, w, bias, gelu_out, derivative_out, num_rows, tl.program_id(0),
                      K, F, BLOCK_N, BLOCK_F, BLOCK_K, GROUP, TMA, HALVES, EXACT, HARDWARE)


@triton.jit
def _backward_epilogue(da, factor, out, partials, row_tile, row, column, num_rows,
                       F: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    # Rows past the end have factor 0 (masked, or filled by the tensor map), so they add nothing to the sums.
    dh = da * factor.to(tl.float32)
    _store(out, dh, row, column, num_rows, F, BLOCK_N, WIDTH, TMA)
    columns = column + tl.arange(0, WIDTH)
    tl.store(partials + tl.cast(row_tile, tl.int64) * F + columns, tl.sum(dh, 0), mask=columns < F)


@triton.jit
def _backward_tile(dy, w, factor, out, partials, num_rows, tile,
                   K: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
                   BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, HALVES: tl.constexpr,
                   EARLY: tl.constexpr, FACTOR_TMA: tl.constexpr):
    row_tile, column_tile = _tile_position(tile, num_rows, F, BLOCK_N, BLOCK_F, GROUP)
    row = row_tile * BLOCK_N
    column = column_tile * BLOCK_F
    if EARLY:
        early = _load(factor, row, column, num_rows, F, BLOCK_N, BLOCK_F, FACTOR_TMA)
        da = _multiply(dy, w, row, column, num_rows, K, F, BLOCK_N, BLOCK_F, BLOCK_K, False, TMA)
        _backward_epilogue(da, early, out, partials, row_tile, row, column, num_rows,
                           F, BLOCK_N, BLOCK_F, TMA)
    else:
        da = _multiply(dy, w, row, column, num_rows, K, F, BLOCK_N, BLOCK_F, BLOCK_K, False, TMA)
        if HALVES:
            W: tl.constexpr = BLOCK_F // 2
            left, right = _split_columns(da, BLOCK_N, BLOCK_F)
            late = _load(factor, row, column, num_rows, F, BLOCK_N, W, FACTOR_TMA)
            _backward_epilogue(left, late, out, partials, row_tile, row, column, num_rows, F, BLOCK_N, W, TMA)
            late = _load(factor, row, column + W, num_rows, F, BLOCK_N, W, FACTOR_TMA)
            _backward_epilogue(right, late, out, partials, row_tile, row, column + W, num_rows,
                               F, BLOCK_N, W, TMA)
        else:
            late = _load(factor, row, column, num_rows, F, BLOCK_N, BLOCK_F, FACTOR_TMA)
            _backward_epilogue(da, late, out, partials, row_tile, row, column, num_rows,
                               F, BLOCK_N, BLOCK_F, TMA)


@triton.jit
def backward_kernel(dy, w, factor, out, partials, num_rows,
                    K: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
                    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, HALVES: tl.constexpr,
                    PERSISTENT: tl.constexpr, EARLY: tl.constexpr, FACTOR_TMA: tl.constexpr):
    """out [num_rows, F] = dy [num_rows, K] @ w [K, F] * factor; partials [row tiles, F]: sums by tile."""
    if PERSISTENT:
        tiles = tl.cdiv(num_rows, BLOCK_N) * tl.cdiv(F, BLOCK_F)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=TMA):
            _backward_tile(dy, w, factor, out, partials, num_rows, tile,
                           K, F, BLOCK_N, BLOCK_F, BLOCK_K, GROUP, TMA, HALVES, EARLY, FACTOR_TMA)
    else:
        _backward_tile(dy, w, factor, out, partials, num_rows, tl.program_id(0),
                       K, F, BLOCK_N, BLOCK_F, BLOCK_K, GROUP, TMA, HALVES, EARLY, FACTOR_TMA)
