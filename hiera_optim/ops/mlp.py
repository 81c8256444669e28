"""The MLP's GELU around its GEMMs: elementwise kernels to follow cuBLAS, or fused GEMMs, and the choice
between them.

Forward keeps gelu'(h) beside gelu(h) instead of h, so that backward is one multiplication and the column sums
that are fc1's bias gradient. Either

    h = torch.addmm(bias, x, w1.T);  a, gprime = bias_gelu_forward(h, None)      or
    a, gprime = linear_gelu_forward(x, w1, bias)

and backward, either

    da = dy @ w2;  dh, dbias1 = gelu_backward(da, gprime)                        or
    dh, dbias1 = linear_gelu_backward(dy, w2, gprime)
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hiera_optim.ops._launch import ceil_div, require_contiguous, require_shape
from hiera_optim.ops.column_sum import column_sum, multiply_and_column_sum
from hiera_optim.ops.gelu import gelu_and_derivative, gelu_and_derivative_reference
from hiera_optim.ops.linear_gelu import GemmConfig, linear_gelu_backward, linear_gelu_forward

__all__ = [
    "GemmConfig",
    "bias_gelu_forward",
    "bias_gelu_forward_reference",
    "column_sum",
    "gelu_backward",
    "gelu_backward_reference",
    "linear_gelu_backward",
    "linear_gelu_forward",
    "use_fused",
]

# The longest inner dimension for which the fused GEMM beats cuBLAS and an elementwise kernel, by major
# compute capability: (forward, backward). Absent: never.
LONGEST_FUSED_INNER: dict[int, tuple[int, int]] = {9: (1152, 1152)}


def use_fused(num_rows: int, inner: int, outer: int, capability: tuple[int, int], *, backward: bool = False) -> bool:
    """Whether the fused GEMM is the faster one for [num_rows, inner] by [inner, outer] in bf16 on such a
    device.

    Always False for operands whose rows are no multiple of 16 bytes, which tensor maps cannot describe.
    Float32 runs through the elementwise kernels in any case: the caller asks only for 16-bit operands.
    """
    if inner % 8 or outer % 8 or num_rows == 0:
        return False
    forward_limit, backward_limit = LONGEST_FUSED_INNER.get(capability[0], (0, 0))
    return inner <= (backward_limit if backward else forward_limit)


@triton.jit
def _bias_gelu_kernel(
    h_ptr,
    bias_ptr,
    gelu_ptr,
    derivative_ptr,
    num_rows,
    F: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    column_tiles: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    row_tile = tl.program_id(0) // column_tiles
    cols = tl.program_id(0) % column_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    rows = tl.arange(0, BLOCK_R)
    ok = (rows < num_rows - row_tile * BLOCK_R)[:, None] & (cols < F)[None, :]
    offsets = tl.cast(row_tile, tl.int64) * BLOCK_R * F + rows[:, None] * F + cols[None, :]
    h = tl.load(h_ptr + offsets, mask=ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        h += tl.load(bias_ptr + cols, mask=cols < F, other=0.0).to(tl.float32)[None, :]
    gelu, derivative = gelu_and_derivative(h, EXACT, HARDWARE)
    tl.store(gelu_ptr + offsets, gelu.to(gelu_ptr.dtype.element_ty), mask=ok)
    tl.store(derivative_ptr + offsets, derivative.to(derivative_ptr.dtype.element_ty), mask=ok)


def bias_gelu_forward(
    h: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    block_rows: int = 16,
    block_columns: int | None = None,
    num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gelu(h + bias) and gelu' there: h [N, F], bias [F] or None -> ([N, F], [N, F]) in h's dtype.

    Exact GELU: within 1e-6 for 16-bit dtypes, erf itself for float32. `out`, for the first result, may be
    `h`. The block sizes are there for the benchmark. Raises ValueError for shapes that do not fit or tensors
    that are not contiguous.
    """
    if h.dim() != 2 or h.shape[0] == 0:
        raise ValueError(f"h must be a matrix with at least one row, got shape {tuple(h.shape)}")
    num_rows, columns = h.shape
    if bias is not None:
        require_shape("bias", bias, (columns,))
    gelu = torch.empty_like(h) if out is None else out
    require_shape("out", gelu, (num_rows, columns))
    require_contiguous(h=h, bias=bias, out=gelu)
    derivative = torch.empty_like(h)
    block_f = block_columns or next((b for b in (128, 64) if columns % b == 0), 128)
    _bias_gelu_kernel[(ceil_div(num_rows, block_rows) * ceil_div(columns, block_f),)](
        h,
        h if bias is None else bias,
        gelu,
        derivative,
        num_rows,
        F=columns,
        HAS_BIAS=bias is not None,
        EXACT=h.dtype == torch.float32,
        HARDWARE=h.is_cuda,
        BLOCK_R=block_rows,
        BLOCK_F=block_f,
        num_warps=num_warps,
    )
    return gelu, derivative


def gelu_backward(
    da: torch.Tensor,
    gprime: torch.Tensor,
    *,
    in_place: bool = False,
    block_rows: int = 16,
    block_columns: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    programs_per_multiprocessor: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """da * gprime and its column sums: da, gprime [N, F] -> (dh [N, F] in da's dtype, fp32 [F]).

    The sums are fc1's bias gradient, bitwise the same in every run on one card. `in_place` writes dh over da.
    Raises ValueError for shapes that do not fit or tensors that are not contiguous.
    """
    return multiply_and_column_sum(
        da,
        gprime,
        out=da if in_place else None,
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=num_warps,
        num_stages=num_stages,
        programs_per_multiprocessor=programs_per_multiprocessor,
    )


def bias_gelu_forward_reference(h: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch oracle of `bias_gelu_forward` (of `linear_gelu_forward` with h = x @ w.T)."""
    return gelu_and_derivative_reference(h if bias is None else h + bias)


def gelu_backward_reference(da: torch.Tensor, gprime: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch oracle of `gelu_backward` (of `linear_gelu_backward` with da = dy @ w2)."""
    dh = da * gprime
    return dh, dh.sum(0)
