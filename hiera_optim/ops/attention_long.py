"""Attention over sequences too long to keep on chip: loops over blocks of keys, online softmax.

Shapes as in attention.py (qkv [G, T, 3, H, D], lse [G, H, T // q_stride] in log2). Forward and the dq kernel
take one block of queries of one head and loop over its keys; the dk, dv kernel takes one block of keys and
loops over the queries. Every gradient element has one writer: no atomics. S is computed three times in all,
so past a thousand tokens a kernel with saved statistics and atomics (flash) is the better choice; see
`can_run` in attention.py.
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
    store_column_sums,
    store_queries,
    store_rows,
    zero_rows,
)

# ---- kernels ----


@triton.jit
def long_forward(
    qkv,
    out,
    lse,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    STRIDE: tl.constexpr = 3 * H * D
    TQ: tl.constexpr = T // Q_STRIDE
    BLOCKS: tl.constexpr = (TQ + BLOCK_M - 1) // BLOCK_M
    group = tl.cast(tl.program_id(0) // (BLOCKS * H), tl.int64)
    head = tl.program_id(0) // BLOCKS % H
    rows = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = qkv + group * (T * STRIDE) + head * D
    q, _ = load_queries(tokens, rows, TQ, STRIDE, DIMS, D, Q_STRIDE)
    o = zero_rows(BLOCK_M, DIMS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, T, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(tokens + H * D, keys, T, STRIDE, DIMS, D)
        v = load_rows(tokens + 2 * H * D, keys, T, STRIDE, DIMS, D)
        s = row_products(q, k, DIMS, PRECISION)
        if T % BLOCK_N != 0:
            s = tl.where((keys < T)[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * (SCALE * LOG2_E))
        p = tl.exp2(s * (SCALE * LOG2_E) - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(p, 1)
        kept = ()
        for i in tl.static_range(len(DIMS)):
            kept = kept + (o[i] * factor[:, None],)
        o = add_products(kept, p.to(qkv.dtype.element_ty), v, DIMS, PRECISION)
        top = new_top
    scaled = ()
    for i in tl.static_range(len(DIMS)):
        scaled = scaled + (o[i] / total[:, None],)
    store_rows(out + group * (TQ * H * D) + head * D, rows, TQ, scaled, H * D, DIMS, D)
    tl.store(lse + (group * H + head) * TQ + rows, top + tl.log2(total), mask=rows < TQ)


@triton.jit
def long_backward_queries(
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
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of one block of queries, delta [G, H, TQ] = rowsum(o∘do), and the block's row of partial [.., 2, H,
    D]."""
    STRIDE: tl.constexpr = 3 * H * D
    TQ: tl.constexpr = T // Q_STRIDE
    BLOCKS: tl.constexpr = (TQ + BLOCK_M - 1) // BLOCK_M
    group = tl.cast(tl.program_id(0) // (BLOCKS * H), tl.int64)
    head = tl.program_id(0) // BLOCKS % H
    block = tl.program_id(0) % BLOCKS
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = qkv + group * (T * STRIDE) + head * D
    q, winners = load_queries(tokens, rows, TQ, STRIDE, DIMS, D, Q_STRIDE)
    do = load_rows(grad_out + group * (TQ * H * D) + head * D, rows, TQ, H * D, DIMS, D)
    o = load_rows(out + group * (TQ * H * D) + head * D, rows, TQ, H * D, DIMS, D)
    statistics = (group * H + head) * TQ + rows
    top = tl.load(lse + statistics, mask=rows < TQ, other=0.0)
    shift = tl.zeros_like(top)
    for i in tl.static_range(len(DIMS)):
        shift += tl.sum(o[i].to(tl.float32) * do[i].to(tl.float32), 1)
    tl.store(delta + statistics, shift, mask=rows < TQ)
    dq = zero_rows(BLOCK_M, DIMS)
    for start in tl.range(0, T, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(tokens + H * D, keys, T, STRIDE, DIMS, D)
        v = load_rows(tokens + 2 * H * D, keys, T, STRIDE, DIMS, D)
        p = tl.exp2(row_products(q, k, DIMS, PRECISION) * (SCALE * LOG2_E) - top[:, None])
        if T % BLOCK_N != 0:
            p = tl.where((keys < T)[None, :], p, 0.0)
        ds = p * (row_products(do, v, DIMS, PRECISION) - shift[:, None])
        dq = add_products(dq, ds.to(qkv.dtype.element_ty), k, DIMS, PRECISION)
    scaled = ()
    for i in tl.static_range(len(DIMS)):
        scaled = scaled + (dq[i] * SCALE,)
    grads = grad_qkv + group * (T * STRIDE) + head * D
    store_queries(grads, rows, TQ, scaled, winners, STRIDE, DIMS, D, Q_STRIDE)
    sums = partial + (group * BLOCKS + block) * (2 * H * D) + head * D
    store_column_sums(sums, scaled, DIMS, D)
    store_column_sums(sums + H * D, do, DIMS, D)


@triton.jit
def long_backward_keys(
    grad_out,
    qkv,
    lse,
    delta,
    grad_qkv,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and dv of one block of keys; Pᵀ and dSᵀ [BLOCK_N, BLOCK_M], so that both feed their products from
    registers."""
    STRIDE: tl.constexpr = 3 * H * D
    TQ: tl.constexpr = T // Q_STRIDE
    BLOCKS: tl.constexpr = (T + BLOCK_N - 1) // BLOCK_N
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    group = tl.cast(tl.program_id(0) // (BLOCKS * H), tl.int64)
    head = tl.program_id(0) // BLOCKS % H
    keys = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = qkv + group * (T * STRIDE) + head * D
    upstream = grad_out + group * (TQ * H * D) + head * D
    statistics = (group * H + head) * TQ
    k = load_rows(tokens + H * D, keys, T, STRIDE, DIMS, D)
    v = load_rows(tokens + 2 * H * D, keys, T, STRIDE, DIMS, D)
    dk = zero_rows(BLOCK_N, DIMS)
    dv = zero_rows(BLOCK_N, DIMS)
    for start in tl.range(0, TQ, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        q, _ = load_queries(tokens, rows, TQ, STRIDE, DIMS, D, Q_STRIDE)
        do = load_rows(upstream, rows, TQ, H * D, DIMS, D)
        top = tl.load(lse + statistics + rows, mask=rows < TQ, other=0.0)
        shift = tl.load(delta + statistics + rows, mask=rows < TQ, other=0.0)
        p = tl.exp2(row_products(k, q, DIMS, PRECISION) * (SCALE * LOG2_E) - top[None, :])
        dv = add_products(dv, p.to(DTYPE), do, DIMS, PRECISION)
        ds = p * (row_products(v, do, DIMS, PRECISION) - shift[None, :])
        dk = add_products(dk, ds.to(DTYPE), q, DIMS, PRECISION)
    scaled = ()
    for i in tl.static_range(len(DIMS)):
        scaled = scaled + (dk[i] * SCALE,)
    grads = grad_qkv + group * (T * STRIDE) + head * D
    store_rows(grads + 2 * H * D, keys, T, dv, STRIDE, DIMS, D)
    store_rows(grads + H * D, keys, T, scaled, STRIDE, DIMS, D)
