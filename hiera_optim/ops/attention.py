"""Attention over short sequences: one Triton kernel forward and one backward, on packed qkv.

Shapes: G windows, T tokens a window (z-order), H heads, D head dim, W windows packed into one tile.
    qkv  [G, T, 3, H, D]              contiguous output of the qkv projection
    o    [G, T // q_stride, H * D]
    lse  [G, H, T // q_stride]        fp32, log2 of the softmax denominators
A program takes one head of a tile of W windows and keeps all of its keys and values on chip, so that backward writes
the packed gradient without atomics and with no second pass. Up to BLOCK_M queries, backward recomputes whole softmax
rows and needs neither o nor lse; with more, it takes them from forward (`needs_lse` says so), since the accumulators
of dk and dv leave no registers for whole rows. Longer sequences go to attention_long.py.

Rows of P sum to one, so the column sums of dv are those of grad_o, and those of dk are zero: of the bias gradient only
q's part needs dqkv.

A NaN or Inf in one window can reach the windows that share its tile: the step is lost either way.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiera_optim.ops.attention_blocks import (
    LOG2_E,
    add_products,
    head_dim_blocks,
    load_keys,
    load_queries,
    load_rows,
    row_products,
    softmax_numerators,
    split_blocks,
    store_column_sums,
    store_keys,
    store_queries,
    store_rows,
    sum_partials,
    zero_keys,
)
from hiera_optim.ops.attention_config import (
    DTYPES,
    MAX_TOKENS,
    AttentionConfig,
    backward_config,
    device_limits,
    forward_config,
    power_of_two,
)
from hiera_optim.ops.attention_long import long_backward_keys, long_backward_queries, long_forward

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
def _attention_forward(
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
    # Hoisting the offsets of every block out of the loops costs up to 100 registers: no loop-invariant code motion.
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
    """All queries of a tile at once: whole softmax rows, delta = rowsum(P∘dP). Stores dv, dk, dq in this order,
    each before the next is computed: together they would hold 144 registers a thread at 64 x 96."""
    STRIDE: tl.constexpr = 3 * H * D
    DTYPE: tl.constexpr = tokens.dtype.element_ty
    q, winners = load_queries(tokens, rows, limit, STRIDE, DIMS, D, Q_STRIDE)
    do = load_rows(upstream, rows, limit, H * D, DIMS, D)
    e, _, total = softmax_numerators(
        q, k, rows, SCALE * LOG2_E, T, T // Q_STRIDE, WINDOWS, KEYS, DIMS, PRECISION
    )
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
    """One of several blocks of query rows, key block by key block: stores dq, returns dk / SCALE and dv so far."""
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
def _attention_backward(
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


# ---- launchers ----

def _check(qkv: Tensor, q_stride: int) -> tuple[int, int, int, int]:
    if qkv.dim() != 5 or qkv.shape[2] != 3 or not qkv.is_contiguous():
        raise ValueError(f"attention needs a contiguous qkv [G, T, 3, H, D], got {tuple(qkv.shape)}")
    groups, tokens, _, heads, dim = qkv.shape
    if not can_run(tokens, heads, dim, q_stride, qkv.dtype):
        raise ValueError(
            f"attention kernels do not cover T={tokens}, H={heads}, D={dim}, q_stride={q_stride}, {qkv.dtype}"
        )
    return groups, tokens, heads, dim


def can_run(T: int, H: int, D: int, q_stride: int, dtype: torch.dtype) -> bool:
    """Whether the kernels cover this shape on the current GPU; where not, callers use SDPA.

    T 1 to 1024 and a multiple of q_stride, D a multiple of 8 from 16 to 128, bf16, fp16 or fp32 (without TF32, so
    slowly), compute capability 8.0 or newer.
    """
    capability, _ = device_limits(torch.cuda.current_device() if torch.cuda.is_available() else None)
    return (
        1 <= T <= MAX_TOKENS
        and H >= 1
        and 16 <= D <= 128
        and D % 8 == 0
        and q_stride >= 1
        and T % q_stride == 0
        and dtype in DTYPES
        and capability >= (8, 0)
    )


def needs_lse(T: int, H: int, D: int, q_stride: int, dtype: torch.dtype) -> bool:
    """Whether `attention_backward` wants o and lse of `attention_forward_lse` (it recomputes them if not given)."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return _uses_lse(backward_config(1 << 20, T, H, D, q_stride, dtype, index), T // q_stride)


def _uses_lse(config: AttentionConfig, queries: int) -> bool:
    return config.streamed or config.windows * queries > config.block_m


def _grid(config: AttentionConfig, tiles: int, heads: int, index: int | None) -> tuple[int]:
    if config.programs_per_sm == 0:
        return (tiles * heads,)
    programs = device_limits(index)[1] * config.programs_per_sm // heads
    return (max(1, min(tiles, programs)) * heads,)


def _launch_options(config: AttentionConfig) -> dict[str, int]:
    options = {"num_warps": config.num_warps, "num_stages": 1}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return options


def _forward(qkv: Tensor, q_stride: int, with_lse: bool, config: AttentionConfig | None) -> tuple[Tensor, Tensor]:
    groups, tokens, heads, dim = _check(qkv, q_stride)
    queries = tokens // q_stride
    if config is None:
        config = forward_config(groups, tokens, heads, dim, q_stride, qkv.dtype, qkv.device.index)
    out = qkv.new_empty(groups, queries, heads * dim)
    with_lse = with_lse or config.streamed
    lse = qkv.new_empty((groups, heads, queries) if with_lse else (0,), dtype=torch.float32)
    if groups == 0:
        return out, lse
    shape = {"T": tokens, "H": heads, "D": dim, "Q_STRIDE": q_stride, "SCALE": dim**-0.5}
    common = {"BLOCK_M": config.block_m, "DIMS": head_dim_blocks(dim), "PRECISION": _precision(qkv)}
    if config.streamed:
        blocks = -(-queries // config.block_m)
        long_forward[(groups * heads * blocks,)](
            qkv, out, lse, **shape, **common, BLOCK_N=config.key_block, STAGES=config.num_stages,
            **_launch_options(config),
        )  # fmt: skip
        return out, lse
    if with_lse and config.windows > 1:
        config = replace(config, windows=1, block_m=power_of_two(queries))
    tiles = -(-groups // config.windows)
    _attention_forward[_grid(config, tiles, heads, qkv.device.index)](
        qkv, out, lse, groups, tiles, **shape, **common, WINDOWS=config.windows,
        KEYS=split_blocks(config.windows * tokens, config.key_block, config.key_round),
        TILE_STAGES=config.num_stages, WITH_LSE=with_lse, **_launch_options(config),
    )  # fmt: skip
    return out, lse


def _precision(qkv: Tensor) -> str:
    return "ieee" if qkv.dtype == torch.float32 else "tf32"


def attention_forward(qkv: Tensor, q_stride: int = 1, *, config: AttentionConfig | None = None) -> Tensor:
    """softmax(pool(q) kᵀ / √D) v: qkv [G, T, 3, H, D] contiguous, to [G, T // q_stride, H * D] of the same dtype.

    Queries are max-pooled over q_stride consecutive tokens. Raises ValueError where `can_run` is False.
    """
    return _forward(qkv, q_stride, False, config)[0]


def attention_forward_lse(
    qkv: Tensor, q_stride: int = 1, *, config: AttentionConfig | None = None
) -> tuple[Tensor, Tensor]:
    """`attention_forward` and lse [G, H, T // q_stride] fp32, the log2 of the softmax denominators."""
    return _forward(qkv, q_stride, True, config)


def attention_backward(
    grad_o: Tensor,
    qkv: Tensor,
    q_stride: int = 1,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of `attention_forward`: (dqkv like qkv, dbias fp32 [3 * H * D] = column sums of dqkv).

    grad_o is [G, T // q_stride, H * D], contiguous, of qkv's dtype. Where `needs_lse` is True, o and lse should be
    those of `attention_forward_lse`; missing, they are computed once more. dbias is summed from fp32 values, its k part
    is exactly zero; both results are deterministic. Raises ValueError where `can_run` is False.
    """
    groups, tokens, heads, dim = _check(qkv, q_stride)
    queries = tokens // q_stride
    if grad_o.shape != (groups, queries, heads * dim) or grad_o.dtype != qkv.dtype or not grad_o.is_contiguous():
        raise ValueError(
            f"attention needs a contiguous grad_o {(groups, queries, heads * dim)} of {qkv.dtype}, "
            f"got {tuple(grad_o.shape)} of {grad_o.dtype}"
        )
    if config is None:
        config = backward_config(groups, tokens, heads, dim, q_stride, qkv.dtype, qkv.device.index)
    dqkv = torch.empty_like(qkv)
    dbias = qkv.new_empty(3 * heads * dim, dtype=torch.float32)
    if groups == 0:
        return dqkv, dbias.zero_()
    if _uses_lse(config, queries):
        if o is None or lse is None:
            o, lse = attention_forward_lse(qkv, q_stride)
    else:
        o, lse = grad_o, dbias  # not read
    blocks = -(-config.windows * queries // config.block_m)
    tiles = -(-groups // config.windows)
    partial = qkv.new_empty(tiles * blocks, 2, heads * dim, dtype=torch.float32)
    shape = {"T": tokens, "H": heads, "D": dim, "Q_STRIDE": q_stride, "SCALE": dim**-0.5}
    common = {"BLOCK_M": config.block_m, "DIMS": head_dim_blocks(dim), "PRECISION": _precision(qkv)}
    options = _launch_options(config)
    if config.streamed:
        common |= {"BLOCK_N": config.key_block, "STAGES": config.num_stages}
        delta = torch.empty_like(lse)
        long_backward_queries[(groups * heads * blocks,)](
            grad_o, qkv, o, lse, delta, dqkv, partial, **shape, **common, **options
        )
        key_blocks = -(-tokens // config.key_block)
        long_backward_keys[(groups * heads * key_blocks,)](
            grad_o, qkv, lse, delta, dqkv, **shape, **common, **options
        )
    else:
        _attention_backward[_grid(config, tiles, heads, qkv.device.index)](
            grad_o, qkv, o, lse, dqkv, partial, groups, tiles, **shape, **common, WINDOWS=config.windows,
            KEYS=split_blocks(config.windows * tokens, config.key_block, config.key_round),
            TILE_STAGES=config.num_stages, **options,
        )  # fmt: skip
    columns = 8 if heads * dim <= 256 else 16
    sum_partials[(triton.cdiv(3 * heads * dim, columns),)](
        partial, dbias, tiles * blocks, WIDTH=heads * dim, COLUMNS=columns, ROWS=256, num_warps=8
    )
    return dqkv, dbias
