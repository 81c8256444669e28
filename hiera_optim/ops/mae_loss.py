"""Normalised pixel labels and mean squared error of the masked tokens, without the labels ever in memory.

FAIR's label of a token is its patch of the input, standardised with its own mean and unbiased variance
(He et al. 2021, arXiv 2111.06377, section 4.1; hiera_mae.py `get_pixel_label_2d`). Forward and backward each read the
patch again, which costs half of what writing and reading an fp32 label would.

Legend: B batch, D dropped mask units in a sample, S tokens in a mask unit at the decoder, F values in a patch,
R = B * D * S rows.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiera_optim.ops._launch import require_contiguous

VARIANCE_EPS = 1e-6  # hiera_mae.py


@dataclass(frozen=True)
class LabelTables:
    """Static addresses of a geometry's labels, on one device."""

    origin: Tensor
    """[M * S] int32: offset of each token's first value in one channel of the input; tokens of a unit in Z-order."""
    offsets: Tensor
    """[F] int32: offset of each value of a patch from its first, in FAIR's order of elements."""


@triton.jit
def _patch(x_ptr, drop_ptr, origin_ptr, offsets_ptr, sample_stride, D, S, F, row, f):
    unit_row = row // S
    b = unit_row // D
    unit = tl.load(drop_ptr + unit_row)
    base = b.to(tl.int64) * sample_stride + tl.load(origin_ptr + unit * S + row % S)
    offsets = tl.load(offsets_ptr + f, mask=f < F, other=0)
    return tl.load(x_ptr + base + offsets, mask=f < F, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    pred_ptr, x_ptr, drop_ptr, origin_ptr, offsets_ptr, error_ptr, mean_ptr, rstd_ptr,
    sample_stride, D, S, F, eps, BF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    f = tl.arange(0, BF)
    value = _patch(x_ptr, drop_ptr, origin_ptr, offsets_ptr, sample_stride, D, S, F, row, f)
    mean = tl.sum(value, 0) / F
    centred = tl.where(f < F, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / (F - 1) + eps)
    pred = tl.load(pred_ptr + row.to(tl.int64) * F + f, mask=f < F, other=0.0).to(tl.float32)
    error = pred - centred * rstd
    tl.store(error_ptr + row, tl.sum(error * error, 0))
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    grad_ptr, pred_ptr, x_ptr, drop_ptr, origin_ptr, offsets_ptr, mean_ptr, rstd_ptr, grad_pred_ptr,
    sample_stride, D, S, F, scale, BF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    f = tl.arange(0, BF)
    value = _patch(x_ptr, drop_ptr, origin_ptr, offsets_ptr, sample_stride, D, S, F, row, f)
    label = (value - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row)
    at = row.to(tl.int64) * F + f
    pred = tl.load(pred_ptr + at, mask=f < F, other=0.0).to(tl.float32)
    grad = (pred - label) * (scale * tl.load(grad_ptr).to(tl.float32))
    tl.store(grad_pred_ptr + at, grad.to(grad_pred_ptr.dtype.element_ty), mask=f < F)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


def mae_loss_forward(pred: Tensor, x: Tensor, drop_idx: Tensor, tables: LabelTables) -> tuple[Tensor, Tensor, Tensor]:
    """Mean squared error against the normalised patches.

    Args:
        pred: [R, F] predictions of the dropped units' tokens, any float dtype.
        x: [B, C, *input_size], contiguous, any float dtype.
        drop_idx: [B, D] int64, contiguous, the dropped units.
        tables: addresses of the geometry.

    Returns:
        loss (0-d fp32), and each row's mean and reciprocal standard deviation ([R] fp32) for the backward.
    """
    R, F = pred.shape
    require_contiguous(pred=pred, x=x, drop_idx=drop_idx)
    error, mean, rstd = (torch.empty(R, dtype=torch.float32, device=pred.device) for _ in range(3))
    BF = triton.next_power_of_2(F)
    S = R // drop_idx.numel()
    _forward_kernel[(R,)](
        pred, x, drop_idx, tables.origin, tables.offsets, error, mean, rstd,
        x[0].numel(), drop_idx.shape[1], S, F, VARIANCE_EPS, BF=BF, num_warps=_warps(BF),
    )  # fmt: skip
    return error.sum() / (R * F), mean, rstd


def mae_loss_backward(
    grad: Tensor, pred: Tensor, x: Tensor, drop_idx: Tensor, mean: Tensor, rstd: Tensor, tables: LabelTables
) -> Tensor:
    """Gradient of the loss with respect to pred ([R, F], pred's dtype), given the loss's gradient (0-d)."""
    R, F = pred.shape
    require_contiguous(pred=pred, x=x, drop_idx=drop_idx)
    grad_pred = torch.empty_like(pred)
    BF = triton.next_power_of_2(F)
    S = R // drop_idx.numel()
    _backward_kernel[(R,)](
        grad, pred, x, drop_idx, tables.origin, tables.offsets, mean, rstd, grad_pred,
        x[0].numel(), drop_idx.shape[1], S, F, 2.0 / (R * F), BF=BF, num_warps=_warps(BF),
    )  # fmt: skip
    return grad_pred


def mae_loss_reference(pred: Tensor, x: Tensor, drop_idx: Tensor, tables: LabelTables) -> Tensor:
    """The same loss in plain PyTorch, in x's precision or float32, whichever is higher; differentiable."""
    B, D = drop_idx.shape
    S = pred.shape[0] // (B * D)
    origin = tables.origin.view(-1, S)[drop_idx].long()  # [B, D, S]
    at = (origin[..., None] + tables.offsets).view(B, -1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    patch = x.reshape(B, -1).gather(1, at).view(pred.shape).to(dtype)
    label = (patch - patch.mean(-1, keepdim=True)) / (patch.var(-1, keepdim=True) + VARIANCE_EPS) ** 0.5
    return ((pred.to(dtype) - label) ** 2).mean()
