"""Attention over short sequences on packed qkv: launchers of the Triton kernels.

Shapes: G windows, T tokens a window (z-order), H heads, D head dim.
    qkv  [G, T, 3, H, D]              contiguous output of the qkv projection
    o    [G, T // q_stride, H * D]
    lse  [G, H, T // q_stride]        fp32, log2 of the softmax denominators
Kernels: attention_resident.py (keys of a tile on chip), attention_long.py (longer sequences), for backward also
attention_key_rows.py and attention_phases.py. The choice between them and their tiling: attention_config.py.
Oracle: attention_reference.py.

Rows of P sum to one, so the column sums of dv are those of grad_o, and those of dk are zero: of the bias
gradient only q's part needs dqkv.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hiera_optim.ops._launch import (
    capability,
    ceil_div,
    multiprocessors,
    require_contiguous,
    require_shape,
)
from hiera_optim.ops.attention_blocks import head_dim_blocks, split_blocks, sum_partials
from hiera_optim.ops.attention_config import (
    DTYPES,
    MAX_TOKENS,
    AttentionConfig,
    backward_config,
    forward_config,
    power_of_two,
)
from hiera_optim.ops.attention_key_rows import key_rows_backward
from hiera_optim.ops.attention_long import long_backward_keys, long_backward_queries, long_forward
from hiera_optim.ops.attention_phases import phased_backward
from hiera_optim.ops.attention_resident import resident_backward, resident_forward
from hiera_optim.ops.batched_sums import Segment, new_partials, take_sum


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

    T 1 to 1024 and a multiple of q_stride, D a multiple of 8 from 16 to 128, bf16, fp16 or fp32 (without
    TF32, so slowly), compute capability 8.0 or newer.
    """
    return (
        1 <= T <= MAX_TOKENS
        and H >= 1
        and 16 <= D <= 128
        and D % 8 == 0
        and q_stride >= 1
        and T % q_stride == 0
        and dtype in DTYPES
        and (capability(_device()) >= (8, 0) or not torch.cuda.is_available())
    )


def needs_lse(T: int, H: int, D: int, q_stride: int, dtype: torch.dtype) -> bool:
    """Whether `attention_backward` wants o and lse of `attention_forward_lse` (it recomputes them if not
    given)."""
    return _uses_lse(backward_config(1 << 20, T, H, D, q_stride, dtype, _device()), T // q_stride)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _uses_lse(config: AttentionConfig, queries: int) -> bool:
    if config.key_rows:
        return config.windows == 1
    return config.streamed or config.phases or config.windows * queries > config.block_m


def _grid(config: AttentionConfig, tiles: int, heads: int, device: torch.device) -> tuple[int]:
    if config.programs_per_sm == 0:
        return (tiles * heads,)
    programs = multiprocessors(device) * config.programs_per_sm // heads
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
        config = forward_config(groups, tokens, heads, dim, q_stride, qkv.dtype, qkv.device)
    out = torch.empty(groups, queries, heads * dim, dtype=qkv.dtype, device=qkv.device)
    with_lse = with_lse or config.streamed
    lse = torch.empty((groups, heads, queries) if with_lse else (0,), dtype=torch.float32, device=qkv.device)
    if groups == 0:
        return out, lse
    shape = {"T": tokens, "H": heads, "D": dim, "Q_STRIDE": q_stride, "SCALE": dim**-0.5}
    common = {"BLOCK_M": config.block_m, "DIMS": head_dim_blocks(dim), "PRECISION": _precision(qkv)}
    if config.streamed:
        blocks = ceil_div(queries, config.block_m)
        long_forward[(groups * heads * blocks,)](
            qkv, out, lse, **shape, **common, BLOCK_N=config.key_block, STAGES=config.num_stages,
            **_launch_options(config),
        )  # fmt: skip
        return out, lse
    if with_lse and config.windows > 1:
        config = replace(config, windows=1, block_m=power_of_two(queries))
    tiles = ceil_div(groups, config.windows)
    resident_forward[_grid(config, tiles, heads, qkv.device)](
        qkv, out, lse, groups, tiles, **shape, **common, WINDOWS=config.windows,
        KEYS=split_blocks(config.windows * tokens, config.key_block, config.key_round),
        TILE_STAGES=config.num_stages, WITH_LSE=with_lse, **_launch_options(config),
    )  # fmt: skip
    return out, lse


def _precision(qkv: Tensor) -> str:
    return "ieee" if qkv.dtype == torch.float32 else "tf32"


def attention_forward(qkv: Tensor, q_stride: int = 1, *, config: AttentionConfig | None = None) -> Tensor:
    """softmax(pool(q) kᵀ / √D) v: qkv [G, T, 3, H, D] contiguous, to [G, T // q_stride, H * D] of the same
    dtype.

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

    grad_o is [G, T // q_stride, H * D], contiguous, of qkv's dtype. Where `needs_lse` is True, o and lse
    should be those of `attention_forward_lse`; missing, they are computed once more. dbias is summed from
    fp32 values, its k part is exactly zero; both results are deterministic. Raises ValueError where `can_run`
    is False.
    """
    groups, tokens, heads, dim = _check(qkv, q_stride)
    queries = tokens // q_stride
    require_contiguous(grad_o=grad_o)
    require_shape("grad_o", grad_o, (groups, queries, heads * dim))
    if grad_o.dtype != qkv.dtype:
        raise ValueError(f"grad_o is {grad_o.dtype}, qkv is {qkv.dtype}")
    if config is None:
        config = backward_config(groups, tokens, heads, dim, q_stride, qkv.dtype, qkv.device)
    dqkv = torch.empty_like(qkv)
    dbias = torch.empty(3 * heads * dim, dtype=torch.float32, device=qkv.device)
    if groups == 0:
        return dqkv, dbias.zero_()
    if _uses_lse(config, queries):
        if o is None or lse is None:
            o, lse = attention_forward_lse(qkv, q_stride)
    else:
        o, lse = grad_o, dbias  # not read
    tiles = ceil_div(groups, config.windows)
    blocks = ceil_div(config.windows * queries, config.block_m)
    if config.windows > 1 and blocks > 1:
        raise ValueError(f"{config.windows} windows a tile need block_m of at least {config.windows * queries}")
    if config.phases and q_stride > 1:
        raise ValueError("the method phases has no pooling of queries")
    grid = _grid(config, tiles, heads, qkv.device)
    rows = tiles * blocks
    if config.key_rows:
        rows = grid[0] // heads
    elif config.phases:
        rows = groups
    partial = new_partials(rows, 2, heads * dim, device=qkv.device)
    shape = {"T": tokens, "H": heads, "D": dim, "SCALE": dim**-0.5}
    shape |= {"DIMS": head_dim_blocks(dim), "PRECISION": _precision(qkv)}
    pooled = shape | {"Q_STRIDE": q_stride, "BLOCK_M": config.block_m}
    options = _launch_options(config)
    if config.key_rows:
        key_rows_backward[grid](
            grad_o, qkv, o, lse, dqkv, partial, groups, tiles, **pooled, WINDOWS=config.windows,
            BLOCK_N=power_of_two(config.windows * tokens), TILE_STAGES=config.num_stages,
            FOLD=2 if config.block_m >= 64 else 1, **options,
        )  # fmt: skip
    elif config.phases:
        phased_backward[(groups * heads * 2,)](
            grad_o, qkv, o, lse, torch.empty_like(lse), dqkv, partial, **shape, ROWS=config.block_m,
            BLOCKS=split_blocks(tokens, config.block_m, config.key_round), **options,
        )  # fmt: skip
    elif config.streamed:
        pooled |= {"BLOCK_N": config.key_block, "STAGES": config.num_stages}
        delta = torch.empty_like(lse)
        long_backward_queries[(groups * heads * blocks,)](
            grad_o, qkv, o, lse, delta, dqkv, partial, **pooled, **options
        )
        key_blocks = ceil_div(tokens, config.key_block)
        long_backward_keys[(groups * heads * key_blocks,)](grad_o, qkv, lse, delta, dqkv, **pooled, **options)
    else:
        resident_backward[grid](
            grad_o, qkv, o, lse, dqkv, partial, groups, tiles, **pooled, WINDOWS=config.windows,
            KEYS=split_blocks(config.windows * tokens, config.key_block, config.key_round),
            TILE_STAGES=config.num_stages, **options,
        )  # fmt: skip
    width = heads * dim
    later = take_sum(partial, 3 * width, (Segment(0, 0, width), Segment(width, 2 * width, width)))
    if later is not None:
        return dqkv, later
    columns = 8 if heads * dim <= 256 else 16
    sum_partials[(ceil_div(3 * heads * dim, columns),)](
        partial, dbias, rows, WIDTH=heads * dim, COLUMNS=columns, ROWS=256, num_warps=8
    )
    return dqkv, dbias
