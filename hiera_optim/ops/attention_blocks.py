"""Pieces that the attention kernels share: block cutting, loads and stores by blocks, softmax of a whole row.

A `Block` is (start, size). Triton tensors have power-of-two extents; an extent such as head dim 96 or 196
keys is a tuple of blocks, 64 + 32 and 128 + 64 + 16, rather than one block padded to 128 or 256, and a value
over it is a tuple of tensors. Names: `DIMS` are the blocks of the head dim, `KEYS` those of the keys of a
tile.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"

from __future__ import annotations

import math

import triton
import triton.language as tl

# ---- constants ----

Block = tuple[int, int]
LOG2_E = tl.constexpr(math.log2(math.e))


def split_blocks(extent: int, largest: int, granule: int = 16) -> tuple[Block, ...]:
    """Cut `extent`, padded to a multiple of `granule`, into falling powers of two of at most `largest`."""
    padded = -(-extent // granule) * granule
    blocks: list[Block] = []
    start = 0
    while start < padded:
        size = min(largest, 1 << ((padded - start).bit_length() - 1))
        blocks.append((start, size))
        start += size
    return tuple(blocks)


def head_dim_blocks(dim: int) -> tuple[Block, ...]:
    """Blocks of the head dim: at most two, since every block more is a wgmma and a store more for each
    product."""
    whole = 1 << max(4, (dim - 1).bit_length())
    blocks = split_blocks(dim, 64)
    return blocks if len(blocks) <= 2 and sum(size for _, size in blocks) < whole else ((0, whole),)


# ---- kernels ----


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def zero_keys(KEYS: tl.constexpr, DIMS: tl.constexpr):
    """fp32 zeros shaped like the keys: a tuple over KEYS of tuples over DIMS."""
    sums = ()
    for j in tl.static_range(len(KEYS)):
        parts = ()
        for i in tl.static_range(len(DIMS)):
            parts = parts + (zeros(KEYS[j][1], DIMS[i][1]),)
        sums = sums + (parts,)
    return sums


@triton.jit
def zero_rows(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """fp32 zeros [ROWS, D] as a tuple over DIMS."""
    parts = ()
    for i in tl.static_range(len(DIMS)):
        parts = parts + (zeros(ROWS, DIMS[i][1]),)
    return parts


@triton.jit
def scale_rows(parts, factor, DIMS: tl.constexpr):
    out = ()
    for i in tl.static_range(len(DIMS)):
        out = out + (parts[i] * factor,)
    return out


@triton.jit
def load_rows(base, rows, limit, STRIDE: tl.constexpr, DIMS: tl.constexpr, D: tl.constexpr):
    """Rows of base [limit, D] as a tuple over DIMS; rows past `limit` are zero."""
    parts = ()
    for i in tl.static_range(len(DIMS)):
        d = DIMS[i][0] + tl.arange(0, DIMS[i][1])
        pointers = base + rows[:, None] * STRIDE + d[None, :]
        if DIMS[i][0] + DIMS[i][1] > D:
            part = tl.load(pointers, mask=(rows < limit)[:, None] & (d < D)[None, :], other=0.0)
        else:
            part = tl.load(pointers, mask=(rows < limit)[:, None], other=0.0)
        parts = parts + (part,)
    return parts


@triton.jit
def store_rows(base, rows, limit, parts, STRIDE: tl.constexpr, DIMS: tl.constexpr, D: tl.constexpr):
    """Store a tuple over DIMS into rows of base [limit, D], in base's dtype."""
    for i in tl.static_range(len(DIMS)):
        d = DIMS[i][0] + tl.arange(0, DIMS[i][1])
        pointers = base + rows[:, None] * STRIDE + d[None, :]
        part = parts[i].to(base.dtype.element_ty)
        if DIMS[i][0] + DIMS[i][1] > D:
            tl.store(pointers, part, mask=(rows < limit)[:, None] & (d < D)[None, :])
        else:
            tl.store(pointers, part, mask=(rows < limit)[:, None])


@triton.jit
def load_keys(base, limit, STRIDE: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, D: tl.constexpr):
    """All keys (or values) of a tile: a tuple over KEYS of tuples over DIMS."""
    blocks = ()
    for j in tl.static_range(len(KEYS)):
        rows = KEYS[j][0] + tl.arange(0, KEYS[j][1])
        blocks = blocks + (load_rows(base, rows, limit, STRIDE, DIMS, D),)
    return blocks


@triton.jit
def store_keys(
    base, limit, sums, factor, STRIDE: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, D: tl.constexpr
):
    """Store factor * sums, shaped like the keys."""
    for j in tl.static_range(len(KEYS)):
        rows = KEYS[j][0] + tl.arange(0, KEYS[j][1])
        parts = ()
        for i in tl.static_range(len(DIMS)):
            parts = parts + (sums[j][i] * factor,)
        store_rows(base, rows, limit, parts, STRIDE, DIMS, D)


@triton.jit
def load_queries(base, rows, limit, STRIDE: tl.constexpr, DIMS: tl.constexpr, D: tl.constexpr, Q_STRIDE: tl.constexpr):
    """Queries max-pooled over Q_STRIDE consecutive tokens, and the token that won (the first one on a
    tie)."""
    if Q_STRIDE == 1:
        parts = load_rows(base, rows, limit, STRIDE, DIMS, D)
        winners = ()
    else:
        parts = ()
        winners = ()
        for i in tl.static_range(len(DIMS)):
            d = DIMS[i][0] + tl.arange(0, DIMS[i][1])
            mask = (rows < limit)[:, None] & (d < D)[None, :]
            pointers = base + rows[:, None] * (Q_STRIDE * STRIDE) + d[None, :]
            best = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            winner = tl.zeros_like(best).to(tl.int32)
            for s in tl.static_range(1, Q_STRIDE):
                x = tl.load(pointers + s * STRIDE, mask=mask, other=0.0).to(tl.float32)
                better = (x > best) | ((x != x) & (best == best))  # NaN wins, as in torch.max
                best = tl.where(better, x, best)
                winner = tl.where(better, s, winner)
            parts = parts + (best.to(base.dtype.element_ty),)
            winners = winners + (winner,)
    return parts, winners


@triton.jit
def store_queries(
    base,
    rows,
    limit,
    parts,
    winners,
    STRIDE: tl.constexpr,
    DIMS: tl.constexpr,
    D: tl.constexpr,
    Q_STRIDE: tl.constexpr,
):
    """Store the gradient of pooled queries: to the winning token of each group, zero to its others."""
    if Q_STRIDE == 1:
        store_rows(base, rows, limit, parts, STRIDE, DIMS, D)
    else:
        for s in tl.static_range(Q_STRIDE):
            chosen = ()
            for i in tl.static_range(len(DIMS)):
                chosen = chosen + (tl.where(winners[i] == s, parts[i], 0.0),)
            store_rows(base + s * STRIDE, rows, limit, chosen, Q_STRIDE * STRIDE, DIMS, D)


@triton.jit
def row_products(a, b, DIMS: tl.constexpr, PRECISION: tl.constexpr):
    """a [M, D] @ bᵀ [D, N] for tuples over DIMS, fp32."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(DIMS)):
        s = tl.dot(a[i], tl.trans(b[i]), s, input_precision=PRECISION)
    return s


@triton.jit
def add_products(sums, weights, b, DIMS: tl.constexpr, PRECISION: tl.constexpr):
    """sums + weights [M, N] @ b [N, D] for tuples over DIMS, fp32; () is zero."""
    out = ()
    for i in tl.static_range(len(DIMS)):
        if len(sums) == 0:
            out = out + (tl.dot(weights, b[i], input_precision=PRECISION),)
        else:
            out = out + (tl.dot(weights, b[i], sums[i], input_precision=PRECISION),)
    return out


@triton.jit
def softmax_numerators(
    q,
    k,
    rows,
    SCALE: tl.constexpr,
    T: tl.constexpr,
    TQ: tl.constexpr,
    WINDOWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Whole softmax rows: 2 ** (SCALE * q kᵀ - top) as a tuple over KEYS, `top` [M] and the row sums [M].

    SCALE includes log2(e). Windows of a tile see their own keys only; query rows past the last window share
    its keys, so that no row is without a key.
    """
    scores = ()
    for j in tl.static_range(len(KEYS)):
        s = row_products(q, k[j], DIMS, PRECISION)
        keys = KEYS[j][0] + tl.arange(0, KEYS[j][1])
        if WINDOWS > 1:
            window = tl.minimum(rows // TQ, WINDOWS - 1)
            s = tl.where(window[:, None] == (keys // T)[None, :], s, float("-inf"))
        elif KEYS[j][0] + KEYS[j][1] > T:
            s = tl.where((keys < T)[None, :], s, float("-inf"))
        scores = scores + (s,)
    top = tl.max(scores[0], 1)
    for j in tl.static_range(1, len(KEYS)):
        top = tl.maximum(top, tl.max(scores[j], 1))
    top = top * SCALE
    numerators = ()
    total = tl.zeros_like(top)
    for j in tl.static_range(len(KEYS)):
        e = tl.exp2(scores[j] * SCALE - top[:, None])
        total += tl.sum(e, 1)
        numerators = numerators + (e,)
    return numerators, top, total


@triton.jit
def store_column_sums(base, parts, DIMS: tl.constexpr, D: tl.constexpr):
    """Column sums of a tuple over DIMS into base [D], fp32."""
    for i in tl.static_range(len(DIMS)):
        d = DIMS[i][0] + tl.arange(0, DIMS[i][1])
        tl.store(base + d, tl.sum(parts[i].to(tl.float32), 0), mask=d < D)


@triton.jit
def sum_partials(partial, out, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Column sums of partial [rows, 2, WIDTH] into out [3, WIDTH]: q's, zero for k, v's."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    third = column // WIDTH
    source = tl.where(third == 2, column - WIDTH, column)
    used = (column < 3 * WIDTH) & (third != 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)
        pointers = partial + r[:, None].to(tl.int64) * (2 * WIDTH) + source[None, :]
        total += tl.load(pointers, mask=(r < rows)[:, None] & used[None, :], other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < 3 * WIDTH)
