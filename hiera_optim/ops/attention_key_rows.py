"""Backward of attention for tiles of at most 64 keys, computed with keys as rows: Sᵀ = k qᵀ.

Shapes: G windows, T tokens a window (z-order), H heads, D head dim, W windows packed into one tile of N = W * T
keys and M = W * T / q_stride queries; tensors as in attention.py.

Pᵀ and dSᵀ come out of the matrix units in the layout in which the products of dv and dk take their first
operand, so only dSᵀ goes through shared memory, once, for dq. A program walks over tiles and loads the next
one while it computes; column sums stay spread over the threads that hold them until its last tile, since
adding them up tile by tile took a quarter of the time.

Resources on Hopper (Triton 3.6, sm_90a, bf16, two stages; registers a thread, spilled bytes, shared memory,
programs an SM):
    1 x 64 x 96      252  0  104 K  2
    1 x 64 x 96/4    168  0   65 K  3   (capped)
    4 x 16 x 96      255  0   92 K  2
    4 x 16 x 96/4    168  0   62 K  3   (capped)
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from hiera_optim.ops.attention_blocks import (
    LOG2_E,
    add_products,
    load_queries,
    load_rows,
    row_products,
    scale_rows,
    store_queries,
    store_rows,
    zero_rows,
)

# ---- kernels ----


@triton.jit
def _add_accumulator_rows(sums, parts, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """sums [ROWS / 2, .] + parts [ROWS, .] folded over rows r and r + 8, which one thread holds in an
    accumulator of the matrix units."""
    out = ()
    for i in tl.static_range(len(DIMS)):
        pairs = parts[i].reshape([ROWS // 16, 2, 8, DIMS[i][1]])
        out = out + (sums[i] + tl.sum(pairs, 1).reshape([ROWS // 2, DIMS[i][1]]),)
    return out


@triton.jit
def _add_loaded_rows(sums, parts, ROWS: tl.constexpr, FOLD: tl.constexpr, DIMS: tl.constexpr):
    """sums [ROWS / FOLD, .] + parts [ROWS, .] folded over rows that one thread has loaded."""
    out = ()
    for i in tl.static_range(len(DIMS)):
        parted = parts[i].to(tl.float32).reshape([FOLD, ROWS // FOLD, DIMS[i][1]])
        out = out + (sums[i] + tl.sum(parted, 0),)
    return out


@triton.jit(do_not_specialize=["groups", "tiles"])
def key_rows_backward(
    grad_out,
    qkv,
    out,
    lse,
    grad_qkv,
    partial,
    groups,
    tiles,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_STAGES: tl.constexpr,
    FOLD: tl.constexpr,
):
    """partial is [programs / H, 2, H, D] fp32: column sums of dq and of do by program.

    With one window a tile, the softmax and delta = rowsum(o∘do) come from forward; with more they are computed
    again, and out and lse are not read."""
    STRIDE: tl.constexpr = 3 * H * D
    TQ: tl.constexpr = T // Q_STRIDE
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    head = tl.program_id(0) % H
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    sums_q = zero_rows(BLOCK_M // 2, DIMS)
    sums_o = zero_rows(BLOCK_M // FOLD, DIMS)
    for tile in tl.range(
        tl.program_id(0) // H, tiles, tl.num_programs(0) // H, num_stages=TILE_STAGES, disable_licm=True
    ):
        first = tl.cast(tile, tl.int64) * WINDOWS
        present = tl.minimum(groups - first, WINDOWS).to(tl.int32)
        tokens = qkv + first * (T * STRIDE) + head * D
        grads = grad_qkv + first * (T * STRIDE) + head * D
        k = load_rows(tokens + H * D, keys, present * T, STRIDE, DIMS, D)
        q, winners = load_queries(tokens, rows, present * TQ, STRIDE, DIMS, D, Q_STRIDE)
        do = load_rows(grad_out + first * (TQ * H * D) + head * D, rows, present * TQ, H * D, DIMS, D)
        v = load_rows(tokens + 2 * H * D, keys, present * T, STRIDE, DIMS, D)
        s = row_products(k, q, DIMS, PRECISION)
        dp = row_products(v, do, DIMS, PRECISION)
        if WINDOWS == 1:
            o = load_rows(out + first * (TQ * H * D) + head * D, rows, TQ, H * D, DIMS, D)
            top = tl.load(lse + (first * H + head) * TQ + rows, mask=rows < TQ, other=0.0)
            delta = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)
            for i in tl.static_range(1, len(DIMS)):
                delta += tl.sum(o[i].to(tl.float32) * do[i].to(tl.float32), 1)
            p = tl.exp2(s * (SCALE * LOG2_E) - top[None, :])
            if BLOCK_N > T:
                p = tl.where((keys < T)[:, None], p, 0.0)
        else:
            # queries past the last window share its keys, so that none is without a key
            window = tl.minimum(rows // TQ, WINDOWS - 1)
            s = tl.where((keys // T)[:, None] == window[None, :], s, float("-inf"))
            top = tl.max(s, 0) * (SCALE * LOG2_E)
            p = tl.exp2(s * (SCALE * LOG2_E) - top[None, :])
            p = p * (1.0 / tl.sum(p, 0))[None, :]
            delta = tl.sum(p * dp, 0)
        dv = add_products((), p.to(DTYPE), do, DIMS, PRECISION)
        store_rows(grads + 2 * H * D, keys, present * T, dv, STRIDE, DIMS, D)
        ds = (p * (dp - delta[None, :])).to(DTYPE)
        dk = add_products((), ds, q, DIMS, PRECISION)
        store_rows(grads + H * D, keys, present * T, scale_rows(dk, SCALE, DIMS), STRIDE, DIMS, D)
        dq = scale_rows(add_products((), tl.trans(ds), k, DIMS, PRECISION), SCALE, DIMS)
        store_queries(grads, rows, present * TQ, dq, winners, STRIDE, DIMS, D, Q_STRIDE)
        sums_q = _add_accumulator_rows(sums_q, dq, BLOCK_M, DIMS)
        sums_o = _add_loaded_rows(sums_o, do, BLOCK_M, FOLD, DIMS)
    sums = partial + tl.cast(tl.program_id(0) // H, tl.int64) * (2 * H * D) + head * D
    for i in tl.static_range(len(DIMS)):
        d = DIMS[i][0] + tl.arange(0, DIMS[i][1])
        tl.store(sums + d, tl.sum(sums_q[i], 0), mask=d < D)
        tl.store(sums + H * D + d, tl.sum(sums_o[i], 0), mask=d < D)
