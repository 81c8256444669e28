"""Attention with a tile's keys on chip: one kernel forward, one backward, on packed qkv.

Shapes: G windows, T tokens a window (z-order), H heads, D head dim, W windows packed into one tile.
    qkv  [G, T, 3, H, D]              contiguous output of the qkv projection
    o    [G, T // q_stride, H * D]
    lse  [G, H, T // q_stride]        fp32, log2 of the softmax denominators
A program takes one head of a tile of W windows and keeps all of its keys and values on chip, so that backward
writes the packed gradient without atomics and with no second pass. With one block of queries, backward
recomputes whole softmax rows and needs neither o nor lse; with more, it takes them from forward, since the
accumulators of dk and dv leave no registers for whole rows.

A NaN or Inf in one window can reach the windows that share its tile: the step is lost either way.

Resources on Hopper (Triton 3.6, sm_90a, bf16; registers a thread, spilled bytes, shared memory, programs an
SM):
    windows x T x D/q_stride     forward              backward
    1 x 64 x 96                   90  0  36 K  5       144  0  56 K  3
    1 x 64 x 96/4                117  0  14 K  4       201  0  26 K  2
    4 x 16 x 96                   94  0  36 K  5       152  0  56 K  3
    4 x 16 x 96/4                161  0  14 K  3       251  0  26 K  2
    1 x 76 x 96                  128  0  42 K  4       255 16  86 K  2
    1 x 196 x 32                 168  0  30 K  3       241  0  50 K  2
    1 x 64 x 72                   83  0  30 K  6       134  0  48 K  3
    1 x 76 x 72                  128  0  35 K  4       255  0 121 K  1   (8 warps, 128 query rows)
    1 x 64 x 64                   80  0  24 K  6       118  0  40 K  4
    1 x 76 x 64                  120  0  28 K  4       251  0  60 K  2
All but blocks of 16 to 32 rows use wgmma.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from hiera_optim.ops.attention_blocks import (
    LOG2_E,
    add_products,
    load_keys,
    load_queries,
    load_rows,
    row_products,
    softmax_numerators,
    store_column_sums,
    store_keys,
    store_queries,
    store_rows,
    zero_keys,
)

# ---- kernels ----


@triton.jit
def _forward_block(
    tokens,
    result,
    lse,
    k,
    v,
    rows,
    limit,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """Output of one block of query rows."""
    TQ: tl.constexpr = T // Q_STRIDE
    q, _ = load_queries(tokens, rows, limit, 3 * H * D, DIMS, D, Q_STRIDE)
    e, top, total = softmax_numerators(q, k, rows, SCALE * LOG2_E, T, TQ, WINDOWS, KEYS, DIMS, PRECISION)
    o = ()
    for j in tl.static_range(len(KEYS)):
        o = add_products(o, e[j].to(tokens.dtype.element_ty), v[j], DIMS, PRECISION)
    scaled = ()
    for i in tl.static_range(len(DIMS)):
        scaled = scaled + (o[i] / total[:, None],)
    store_rows(result, rows, limit, scaled, H * D, DIMS, D)
    if WITH_LSE:
        tl.store(lse + rows, top + tl.log2(total), mask=rows < limit)


@triton.jit(do_not_specialize=["groups", "tiles"])
def resident_forward(
    qkv,
    out,
    lse,
    groups,
    tiles,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_STAGES: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    STRIDE: tl.constexpr = 3 * H * D
    TQ: tl.constexpr = T // Q_STRIDE
    head = tl.program_id(0) % H
    # Hoisting the offsets of every block out of the loops costs up to 100 registers: no loop-invariant code
    # motion.
    for tile in tl.range(
        tl.program_id(0) // H, tiles, tl.num_programs(0) // H, num_stages=TILE_STAGES, disable_licm=True
    ):
        first = tl.cast(tile, tl.int64) * WINDOWS
        present = tl.minimum(groups - first, WINDOWS).to(tl.int32)
        tokens = qkv + first * (T * STRIDE) + head * D
        result = out + first * (TQ * H * D) + head * D
        lse_row = lse + (first * H + head) * TQ
        k = load_keys(tokens + H * D, present * T, STRIDE, KEYS, DIMS, D)
        v = load_keys(tokens + 2 * H * D, present * T, STRIDE, KEYS, DIMS, D)
        if WINDOWS * TQ <= BLOCK_M:
            _forward_block(
                tokens, result, lse_row, k, v, tl.arange(0, BLOCK_M), present * TQ,
                T, H, D, Q_STRIDE, SCALE, WINDOWS, KEYS, DIMS, PRECISION, WITH_LSE,
            )  # fmt: skip
        else:
            for start in tl.range(0, WINDOWS * TQ, BLOCK_M, num_stages=1, disable_licm=True):
                _forward_block(
                    tokens, result, lse_row, k, v, start + tl.arange(0, BLOCK_M), present * TQ,
                    T, H, D, Q_STRIDE, SCALE, WINDOWS, KEYS, DIMS, PRECISION, WITH_LSE,
                )  # fmt: skip


@triton.jit
def _backward_rows(
    tokens,
    upstream,
    grads,
    partial,
    k,
    v,
    rows,
    limit,
    limit_keys,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All queries of a tile at once: whole softmax rows, delta = rowsum(P∘dP). Stores dv, dk, dq in this
    order, each before the next is computed: together they would hold 144 registers a thread at 64 x 96."""
    STRIDE: tl.constexpr = 3 * H * D
    DTYPE: tl.constexpr = tokens.dtype.element_ty
    q, winners = load_queries(tokens, rows, limit, STRIDE, DIMS, D, Q_STRIDE)
    do = load_rows(upstream, rows, limit, H * D, DIMS, D)
    e, _, total = softmax_numerators(q, k, rows, SCALE * LOG2_E, T, T // Q_STRIDE, WINDOWS, KEYS, DIMS, PRECISION)
    inverse = 1.0 / total
    p = ()
    for j in tl.static_range(len(KEYS)):
        p = p + (e[j] * inverse[:, None],)
    dv = ()
    for j in tl.static_range(len(KEYS)):
        dv = dv + (add_products((), tl.trans(p[j].to(DTYPE)), do, DIMS, PRECISION),)
    store_keys(grads + 2 * H * D, limit_keys, dv, 1.0, STRIDE, KEYS, DIMS, D)
    store_column_sums(partial + H * D, do, DIMS, D)
    delta = tl.zeros_like(total)
    dp = ()
    for j in tl.static_range(len(KEYS)):
        product = row_products(do, v[j], DIMS, PRECISION)
        delta += tl.sum(p[j] * product, 1)
        dp = dp + (product,)
    ds = ()
    for j in tl.static_range(len(KEYS)):
        ds = ds + ((p[j] * (dp[j] - delta[:, None])).to(DTYPE),)
    dk = ()
    for j in tl.static_range(len(KEYS)):
        dk = dk + (add_products((), tl.trans(ds[j]), q, DIMS, PRECISION),)
    store_keys(grads + H * D, limit_keys, dk, SCALE, STRIDE, KEYS, DIMS, D)
    dq = ()
    for j in tl.static_range(len(KEYS)):
        dq = add_products(dq, ds[j], k[j], DIMS, PRECISION)
    scaled = ()
    for i in tl.static_range(len(DIMS)):
        scaled = scaled + (dq[i] * SCALE,)
    store_column_sums(partial, scaled, DIMS, D)
    store_queries(grads, rows, limit, scaled, winners, STRIDE, DIMS, D, Q_STRIDE)


@triton.jit
def _backward_block(
    tokens,
    upstream,
    out,
    lse,
    grads,
    partial,
    k,
    v,
    dk,
    dv,
    rows,
    limit,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One of several blocks of query rows, key block by key block: stores dq, returns dk / SCALE and dv so
    far."""
    STRIDE: tl.constexpr = 3 * H * D
    DTYPE: tl.constexpr = tokens.dtype.element_ty
    do = load_rows(upstream, rows, limit, H * D, DIMS, D)
    o = load_rows(out, rows, limit, H * D, DIMS, D)
    top = tl.load(lse + rows, mask=rows < limit, other=0.0)
    delta = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(DIMS)):
        delta += tl.sum(o[i].to(tl.float32) * do[i].to(tl.float32), 1)
    q, winners = load_queries(tokens, rows, limit, STRIDE, DIMS, D, Q_STRIDE)
    store_column_sums(partial + H * D, do, DIMS, D)
    dq = ()
    dk_next = ()
    dv_next = ()
    for j in tl.static_range(len(KEYS)):
        p = tl.exp2(row_products(q, k[j], DIMS, PRECISION) * (SCALE * LOG2_E) - top[:, None])
        if KEYS[j][0] + KEYS[j][1] > T:
            p = tl.where((KEYS[j][0] + tl.arange(0, KEYS[j][1]) < T)[None, :], p, 0.0)
        dv_next = dv_next + (add_products(dv[j], tl.trans(p.to(DTYPE)), do, DIMS, PRECISION),)
        dp = row_products(do, v[j], DIMS, PRECISION)
        ds = (p * (dp - delta[:, None])).to(DTYPE)
        dk_next = dk_next + (add_products(dk[j], tl.trans(ds), q, DIMS, PRECISION),)
        dq = add_products(dq, ds, k[j], DIMS, PRECISION)
    scaled = ()
    for i in tl.static_range(len(DIMS)):
        scaled = scaled + (dq[i] * SCALE,)
    store_column_sums(partial, scaled, DIMS, D)
    store_queries(grads, rows, limit, scaled, winners, STRIDE, DIMS, D, Q_STRIDE)
    return dk_next, dv_next


@triton.jit(do_not_specialize=["groups", "tiles"])
def resident_backward(
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
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_STAGES: tl.constexpr,
):
    """partial is [tiles * blocks, 2, H, D] fp32: column sums of dq and of do by block of query rows."""
    STRIDE: tl.constexpr = 3 * H * D
    TQ: tl.constexpr = T // Q_STRIDE
    BLOCKS: tl.constexpr = (WINDOWS * TQ + BLOCK_M - 1) // BLOCK_M
    head = tl.program_id(0) % H
    for tile in tl.range(
        tl.program_id(0) // H, tiles, tl.num_programs(0) // H, num_stages=TILE_STAGES, disable_licm=True
    ):
        first = tl.cast(tile, tl.int64) * WINDOWS
        present = tl.minimum(groups - first, WINDOWS).to(tl.int32)
        tokens = qkv + first * (T * STRIDE) + head * D
        grads = grad_qkv + first * (T * STRIDE) + head * D
        upstream = grad_out + first * (TQ * H * D) + head * D
        sums = partial + tl.cast(tile, tl.int64) * (BLOCKS * 2 * H * D) + head * D
        k = load_keys(tokens + H * D, present * T, STRIDE, KEYS, DIMS, D)
        v = load_keys(tokens + 2 * H * D, present * T, STRIDE, KEYS, DIMS, D)
        if BLOCKS == 1:
            _backward_rows(
                tokens, upstream, grads, sums, k, v, tl.arange(0, BLOCK_M), present * TQ, present * T,
                T, H, D, Q_STRIDE, SCALE, WINDOWS, KEYS, DIMS, PRECISION,
            )  # fmt: skip
        else:
            result = out + first * (TQ * H * D) + head * D
            lse_row = lse + (first * H + head) * TQ
            dk = zero_keys(KEYS, DIMS)
            dv = zero_keys(KEYS, DIMS)
            for block in tl.range(0, BLOCKS, num_stages=1, disable_licm=True):
                dk, dv = _backward_block(
                    tokens, upstream, result, lse_row, grads, sums + block * (2 * H * D), k, v, dk, dv,
                    block * BLOCK_M + tl.arange(0, BLOCK_M), present * TQ,
                    T, H, D, Q_STRIDE, SCALE, KEYS, DIMS, PRECISION,
                )  # fmt: skip
            store_keys(grads + 2 * H * D, present * T, dv, 1.0, STRIDE, KEYS, DIMS, D)
            store_keys(grads + H * D, present * T, dk, SCALE, STRIDE, KEYS, DIMS, D)
