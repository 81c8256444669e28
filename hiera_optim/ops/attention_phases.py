"""Backward of attention for some hundred tokens of a small head dim, in two phases that recompute the softmax.

Shapes: G windows, T tokens a window, H heads, D head dim, without pooling; tensors as in attention.py. A program
does one phase of one head of one window, with everything that the phase multiplies by on chip:
    queries  keys and values on chip, a loop over blocks of query rows gives dq
    keys     queries and grad_o on chip, a loop over blocks of key rows gives dk and dv, from Sᵀ = k qᵀ
In either, P and dS come out of the matrix units in the layout in which the next product takes its first
operand, and one block of accumulators is live: no transposes through shared memory and 4 programs an SM, which
is worth computing S and dP twice (at 196 x 32 on an H200 174 us against 230 us in one pass).

Resources on Hopper (Triton 3.6, sm_90a, bf16, 196 x 32, capped at 128 registers): 0 bytes spilled, 34 K of
shared memory, 4 programs an SM.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from hiera_optim.ops.attention_blocks import (
    LOG2_E,
    add_products,
    load_keys,
    load_rows,
    row_products,
    scale_rows,
    store_column_sums,
    store_rows,
    zero_rows,
)

# ---- kernels ----


@triton.jit
def _add_rows(a, b, DIMS: tl.constexpr):
    out = ()
    for i in tl.static_range(len(DIMS)):
        out = out + (a[i] + b[i],)
    return out


@triton.jit
def _delta(do, o, DIMS: tl.constexpr):
    delta = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(DIMS)):
        delta += tl.sum(o[i].to(tl.float32) * do[i].to(tl.float32), 1)
    return delta


@triton.jit
def _query_rows(
    q,
    do,
    top,
    delta,
    k,
    v,
    T: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of a block of query rows."""
    DTYPE: tl.constexpr = q[0].dtype
    dq = ()
    for j in tl.static_range(len(BLOCKS)):
        s = row_products(q, k[j], DIMS, PRECISION)
        dp = row_products(do, v[j], DIMS, PRECISION)
        p = tl.exp2(s * (SCALE * LOG2_E) - top[:, None])
        if BLOCKS[j][0] + BLOCKS[j][1] > T:
            p = tl.where((BLOCKS[j][0] + tl.arange(0, BLOCKS[j][1]) < T)[None, :], p, 0.0)
        ds = (p * (dp - delta[:, None])).to(DTYPE)
        dq = add_products(dq, ds, k[j], DIMS, PRECISION)
    return scale_rows(dq, SCALE, DIMS)


@triton.jit
def _key_rows(
    k,
    v,
    q,
    do,
    lse,
    delta,
    T: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of a block of key rows.

    The statistics of the queries are loaded where they are used: held, they take two registers a column."""
    DTYPE: tl.constexpr = k[0].dtype
    dk = ()
    dv = ()
    for j in tl.static_range(len(BLOCKS)):
        s = row_products(k, q[j], DIMS, PRECISION)
        dp = row_products(v, do[j], DIMS, PRECISION)
        queries = BLOCKS[j][0] + tl.arange(0, BLOCKS[j][1])
        top = tl.load(lse + queries, mask=queries < T, other=0.0)
        shift = tl.load(delta + queries, mask=queries < T, other=0.0)
        p = tl.exp2(s * (SCALE * LOG2_E) - top[None, :])
        dv = add_products(dv, p.to(DTYPE), do[j], DIMS, PRECISION)
        ds = (p * (dp - shift[None, :])).to(DTYPE)
        dk = add_products(dk, ds, q[j], DIMS, PRECISION)
    return scale_rows(dk, SCALE, DIMS), dv


@triton.jit
def phased_backward(
    grad_out,
    qkv,
    out,
    lse,
    delta,
    grad_qkv,
    partial,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """delta [G, H, T] fp32 is scratch. partial is [G, 2, H, D] fp32: column sums of dq and of do."""
    STRIDE: tl.constexpr = 3 * H * D
    phase = tl.program_id(0) % 2
    head = tl.program_id(0) // 2 % H
    group = tl.cast(tl.program_id(0) // (2 * H), tl.int64)
    tokens = qkv + group * (T * STRIDE) + head * D
    grads = grad_qkv + group * (T * STRIDE) + head * D
    upstream = grad_out + group * (T * H * D) + head * D
    result = out + group * (T * H * D) + head * D
    lse_row = lse + (group * H + head) * T
    delta_row = delta + (group * H + head) * T
    sums = partial + group * (2 * H * D) + head * D
    if phase == 0:
        k = load_keys(tokens + H * D, T, STRIDE, BLOCKS, DIMS, D)
        v = load_keys(tokens + 2 * H * D, T, STRIDE, BLOCKS, DIMS, D)
        total = zero_rows(ROWS, DIMS)
        for start in tl.range(0, T, ROWS, num_stages=1, disable_licm=True):
            rows = start + tl.arange(0, ROWS)
            q = load_rows(tokens, rows, T, STRIDE, DIMS, D)
            do = load_rows(upstream, rows, T, H * D, DIMS, D)
            o = load_rows(result, rows, T, H * D, DIMS, D)
            top = tl.load(lse_row + rows, mask=rows < T, other=0.0)
            dq = _query_rows(q, do, top, _delta(do, o, DIMS), k, v, T, BLOCKS, SCALE, DIMS, PRECISION)
            total = _add_rows(total, dq, DIMS)
            store_rows(grads, rows, T, dq, STRIDE, DIMS, D)
        store_column_sums(sums, total, DIMS, D)
    else:
        qs = load_keys(tokens, T, STRIDE, BLOCKS, DIMS, D)
        dos = load_keys(upstream, T, H * D, BLOCKS, DIMS, D)
        total_do = ()
        for j in tl.static_range(len(BLOCKS)):
            block = BLOCKS[j][0] + tl.arange(0, BLOCKS[j][1])
            o = load_rows(result, block, T, H * D, DIMS, D)
            tl.store(delta_row + block, _delta(dos[j], o, DIMS), mask=block < T)
            # column sums as a product with ones, all rows alike: no exchange between threads
            ones = tl.full([64, BLOCKS[j][1]], 1.0, tl.float32).to(dos[j][0].dtype)
            total_do = add_products(total_do, ones, dos[j], DIMS, PRECISION)
        for i in tl.static_range(len(DIMS)):
            d = DIMS[i][0] + tl.arange(0, DIMS[i][1])
            row = tl.arange(0, 64)[:, None]
            tl.store(sums + H * D + row + d[None, :], total_do[i], mask=(row == 0) & (d < D)[None, :])
        tl.debug_barrier()  # delta is read by other threads than those that stored it
        for start in tl.range(0, T, ROWS, num_stages=1, disable_licm=True):
            rows = start + tl.arange(0, ROWS)
            k = load_rows(tokens + H * D, rows, T, STRIDE, DIMS, D)
            v = load_rows(tokens + 2 * H * D, rows, T, STRIDE, DIMS, D)
            dk, dv = _key_rows(k, v, qs, dos, lse_row, delta_row, T, BLOCKS, SCALE, DIMS, PRECISION)
            store_rows(grads + 2 * H * D, rows, T, dv, STRIDE, DIMS, D)
            store_rows(grads + H * D, rows, T, dk, STRIDE, DIMS, D)
