"""LayerNorm with the residual addition before it, forward and backward, each one pass over its tensors.

Forward:   s = x + row_scale * delta;  y = LayerNorm(s).  Reads x and delta, writes s and y.
Backward:  grad_x = LayerNorm'(grad_y) + grad_s.          Reads grad_y, grad_s and s, writes grad_x.

`row_scale` is stochastic depth (DropPath): one factor a sample, each sample owning `rows_per_scale` rows.
Backward also delivers the gradients of weight and bias and the column sum of delta's gradient, which is the
bias gradient of the Linear that made delta: three sums over rows from one pass, with a fixed order of
additions and no atomics.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from hiera_optim.ops._launch import ceil_div, multiprocessors, require_contiguous, require_shape
from hiera_optim.ops.batched_sums import new_partials
from hiera_optim.ops.column_sum import sum_partials

__all__ = [
    "RowConfig",
    "add_layer_norm_backward",
    "add_layer_norm_forward",
    "backward_config",
    "forward_config",
]


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """How rows are spread over programs.

    `rows`: rows a tile; `num_warps`: warps a program; `num_stages`: depth of the load pipeline over a
    program's tiles (1: none); `programs_per_multiprocessor`: size of the persistent grid (0: one program a
    tile).
    """

    rows: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


def forward_config(columns: int) -> RowConfig:
    """Forward's launch by row length, as measured on an H200: a warp and about 1024 elements a program.

    One warp reduces a row without barriers; 4 warps and 4096 elements were 3 to 12 % slower.
    """
    block = triton.next_power_of_2(columns)
    rows, warps = max(1, 1024 // block), max(1, block // 512)
    return RowConfig(rows=rows, num_warps=warps, num_stages=1, programs_per_multiprocessor=0)


def backward_config(columns: int, *, wide: bool = False) -> RowConfig:
    """Backward's launch by row length, as measured on an H200: one warp a program up to 512 columns.

    `wide`: float32 rows or a stored grad_delta take more registers a thread; a persistent grid must not be larger
    than what fits at once. Against 4 warps and tiles of 2048 elements: 384 columns 11.8 instead of 19.9 us, 512
    columns 32.5 instead of 41.4 us (9728 and 25088 rows).
    """
    block = triton.next_power_of_2(columns)
    if block >= 2048:
        tile = 2048 if wide else 4096
        return RowConfig(rows=max(1, tile // block), num_warps=8, num_stages=2, programs_per_multiprocessor=2)
    if block >= 1024:
        return RowConfig(rows=2, num_warps=4, num_stages=2, programs_per_multiprocessor=3 if wide else 4)
    rows, programs = (2, 8) if block == 512 else (max(1, 512 // block), 16)
    return RowConfig(rows=rows, num_warps=1, num_stages=2, programs_per_multiprocessor=programs // (2 if wide else 1))


@triton.jit
def _forward_kernel(
    x_ptr,
    delta_ptr,
    row_scale_ptr,
    weight_ptr,
    bias_ptr,
    s_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    rows_per_scale,
    eps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_C)
    col_ok = cols < C
    weight = tl.load(weight_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
    offsets = rows[:, None] * C + cols[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tile * ROWS
        row_ok = rows < num_rows - first
        ok = row_ok[:, None] & col_ok[None, :]
        base = tl.cast(tile, tl.int64) * ROWS * C
        s = tl.load(x_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
        if HAS_DELTA:
            delta = tl.load(delta_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
            if HAS_SCALE:
                scale = tl.load(row_scale_ptr + (first + rows) // rows_per_scale, mask=row_ok, other=0.0)
                delta *= scale[:, None]
            rounded = (s + delta).to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + base + offsets, rounded, mask=ok)
            # The statistics are those of s as stored, which is all that backward sees.
            s = rounded.to(tl.float32)
        mean = tl.sum(s, 1) / C
        centred = tl.where(col_ok[None, :], s - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
        y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(y_ptr + base + offsets, y.to(y_ptr.dtype.element_ty), mask=ok)
        tl.store(mean_ptr + first + rows, mean, mask=row_ok)
        tl.store(rstd_ptr + first + rows, rstd, mask=row_ok)


@triton.jit
def _backward_kernel(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    row_scale_ptr,
    grad_x_ptr,
    grad_delta_ptr,
    partials_ptr,
    num_rows,
    rows_per_scale,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_GRAD_S: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    STORE_DELTA: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_C)
    col_ok = cols < C
    weight = tl.load(weight_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
    offsets = rows[:, None] * C + cols[None, :]
    weight_sum = tl.zeros([ROWS, BLOCK_C], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK_C], tl.float32)
    delta_sum = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tile * ROWS
        row_ok = rows < num_rows - first
        ok = row_ok[:, None] & col_ok[None, :]
        base = tl.cast(tile, tl.int64) * ROWS * C
        grad_y = tl.load(grad_y_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + first + rows, mask=row_ok, other=0.0)
        rstd = tl.load(rstd_ptr + first + rows, mask=row_ok, other=0.0)
        # Columns past C have grad_y = 0, so they add nothing to any of the sums below.
        normal = (s - mean[:, None]) * rstd[:, None]
        scaled = grad_y * weight[None, :]
        along_bias = tl.sum(scaled, 1) / C
        along_normal = tl.sum(scaled * normal, 1) / C
        grad = (scaled - along_bias[:, None] - normal * along_normal[:, None]) * rstd[:, None]
        if HAS_GRAD_S:
            grad += tl.load(grad_s_ptr + base + offsets, mask=ok, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + base + offsets, grad.to(grad_x_ptr.dtype.element_ty), mask=ok)
        if HAS_SCALE:
            scale = tl.load(row_scale_ptr + (first + rows) // rows_per_scale, mask=row_ok, other=0.0)
            grad *= scale[:, None]
        if STORE_DELTA:
            tl.store(grad_delta_ptr + base + offsets, grad.to(grad_delta_ptr.dtype.element_ty), mask=ok)
        weight_sum += grad_y * normal
        bias_sum += grad_y
        if SUMS == 3:
            delta_sum += grad
    out = partials_ptr + tl.program_id(0).to(tl.int64) * SUMS * C + cols
    tl.store(out, tl.sum(weight_sum, 0), mask=col_ok)
    tl.store(out + C, tl.sum(bias_sum, 0), mask=col_ok)
    if SUMS == 3:
        tl.store(out + 2 * C, tl.sum(delta_sum, 0), mask=col_ok)


def _num_programs(num_rows: int, config: RowConfig, device: torch.device) -> int:
    tiles = ceil_div(num_rows, config.rows)
    if config.programs_per_multiprocessor == 0:
        return tiles
    return min(tiles, config.programs_per_multiprocessor * multiprocessors(device))


def _check_matrix(name: str, x: torch.Tensor) -> tuple[int, int]:
    if x.dim() != 2 or x.shape[0] == 0:
        raise ValueError(f"{name} must be a matrix with at least one row, got shape {tuple(x.shape)}")
    return x.shape[0], x.shape[1]


def _check_row_scale(row_scale: torch.Tensor | None, rows_per_scale: int, num_rows: int) -> None:
    if row_scale is None:
        return
    if row_scale.dtype != torch.float32:
        raise TypeError(f"row_scale must be float32, got {row_scale.dtype}")
    if row_scale.numel() * rows_per_scale != num_rows:
        raise ValueError(f"{row_scale.numel()} row scales of {rows_per_scale} rows each do not make {num_rows} rows")


def add_layer_norm_forward(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    rows_per_scale: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
    *,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """s = x + row_scale * delta and its LayerNorm.

    Shapes: x, delta [N, C] (fp32, bf16 or fp16 each); row_scale fp32 [N / rows_per_scale] or None; weight,
    bias [C]. Returns (s [N, C] in x's dtype, or x itself when delta is None; y [N, C] in out_dtype; mean fp32
    [N]; rstd fp32 [N]). Statistics are fp32, of s as rounded to its dtype. Raises ValueError or TypeError for
    arguments that do not fit together. `config` is for the benchmark.
    """
    num_rows, columns = _check_matrix("x", x)
    if delta is None:
        row_scale = None
    else:
        require_shape("delta", delta, (num_rows, columns))
    require_shape("weight", weight, (columns,))
    require_shape("bias", bias, (columns,))
    require_contiguous(x=x, delta=delta, weight=weight, bias=bias, row_scale=row_scale)
    _check_row_scale(row_scale, rows_per_scale, num_rows)
    config = config or forward_config(columns)
    s = x if delta is None else torch.empty_like(x)
    y = torch.empty(num_rows, columns, dtype=out_dtype, device=x.device)
    mean = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _forward_kernel[(_num_programs(num_rows, config, x.device),)](
        x,
        x if delta is None else delta,
        mean if row_scale is None else row_scale,
        weight,
        bias,
        s,
        y,
        mean,
        rstd,
        num_rows,
        rows_per_scale if row_scale is not None else 1,
        eps,
        C=columns,
        BLOCK_C=triton.next_power_of_2(columns),
        ROWS=config.rows,
        HAS_DELTA=delta is not None,
        HAS_SCALE=row_scale is not None,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return s, y, mean, rstd


def add_layer_norm_backward(
    grad_y: torch.Tensor,
    grad_s: torch.Tensor | None,
    s: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    row_scale: torch.Tensor | None,
    rows_per_scale: int,
    *,
    delta_dtype: torch.dtype | None = None,
    with_column_sum: bool = True,
    config: RowConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `add_layer_norm_forward`.

    Shapes: grad_y, s [N, C]; grad_s [N, C], the gradient that reaches s past the norm, or None; mean, rstd
    fp32 [N]; weight [C]; row_scale fp32 [N / rows_per_scale] or None. Returns (grad_x [N, C] in s's dtype;
    dweight fp32 [C]; dbias fp32 [C]; the column sum of delta's gradient fp32 [C], or None without
    `with_column_sum`; grad_delta [N, C] in delta_dtype). grad_delta is None, and grad_x serves, when there is
    no row_scale and delta_dtype (default: s's dtype) is s's dtype. The sums are bitwise the same in every run
    on one card. Raises ValueError or TypeError for arguments that do not fit together.
    """
    num_rows, columns = _check_matrix("s", s)
    require_shape("grad_y", grad_y, (num_rows, columns))
    if grad_s is not None:
        require_shape("grad_s", grad_s, (num_rows, columns))
    require_shape("mean", mean, (num_rows,))
    require_shape("rstd", rstd, (num_rows,))
    require_shape("weight", weight, (columns,))
    require_contiguous(grad_y=grad_y, grad_s=grad_s, s=s, mean=mean, rstd=rstd, weight=weight, row_scale=row_scale)
    _check_row_scale(row_scale, rows_per_scale, num_rows)
    delta_dtype = delta_dtype or s.dtype
    store_delta = row_scale is not None or delta_dtype != s.dtype
    config = config or backward_config(columns, wide=store_delta or s.element_size() > 2)
    num_sums = 3 if with_column_sum else 2
    programs = _num_programs(num_rows, config, s.device)
    grad_x = torch.empty_like(s)
    grad_delta = torch.empty_like(s, dtype=delta_dtype) if store_delta else None
    partials = new_partials(programs, num_sums, columns, device=s.device)
    _backward_kernel[(programs,)](
        grad_y,
        grad_y if grad_s is None else grad_s,
        s,
        mean,
        rstd,
        weight,
        mean if row_scale is None else row_scale,
        grad_x,
        grad_x if grad_delta is None else grad_delta,
        partials,
        num_rows,
        rows_per_scale if row_scale is not None else 1,
        C=columns,
        BLOCK_C=triton.next_power_of_2(columns),
        ROWS=config.rows,
        HAS_GRAD_S=grad_s is not None,
        HAS_SCALE=row_scale is not None,
        STORE_DELTA=store_delta,
        SUMS=num_sums,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    sums = sum_partials(partials)
    return grad_x, sums[0], sums[1], sums[2] if with_column_sum else None, grad_delta
