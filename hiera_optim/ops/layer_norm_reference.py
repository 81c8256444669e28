"""Plain PyTorch oracle of `hiera_optim.ops.layer_norm`: the formulas, in the dtype they are given."""

from __future__ import annotations

import torch


def _per_row(row_scale: torch.Tensor | None, rows_per_scale: int) -> torch.Tensor | float:
    return 1.0 if row_scale is None else row_scale.repeat_interleave(rows_per_scale)[:, None]


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def add_layer_norm_forward_reference(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    rows_per_scale: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(s [N, C], y [N, C], mean [N], rstd [N]) as `add_layer_norm_forward`; float64 throughout for float64
    inputs."""
    dtype = _statistics_dtype(x)
    s = x
    if delta is not None:
        s = (x.to(dtype) + _per_row(row_scale, rows_per_scale) * delta.to(dtype)).to(x.dtype)
    values = s.to(dtype)
    mean = values.mean(1)
    rstd = (values.var(1, unbiased=False) + eps).rsqrt()
    y = (values - mean[:, None]) * rstd[:, None] * weight.to(dtype) + bias.to(dtype)
    return s, y.to(out_dtype), mean, rstd


def add_layer_norm_backward_reference(
    grad_y: torch.Tensor,
    grad_s: torch.Tensor | None,
    s: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    row_scale: torch.Tensor | None,
    rows_per_scale: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(grad_x, dweight, dbias, column sum of grad_delta, grad_delta) as `add_layer_norm_backward`."""
    dtype = _statistics_dtype(s)
    grad = grad_y.to(dtype)
    normal = (s.to(dtype) - mean[:, None]) * rstd[:, None]
    scaled = grad * weight.to(dtype)
    inner = scaled - scaled.mean(1, keepdim=True) - normal * (scaled * normal).mean(1, keepdim=True)
    grad_x = inner * rstd[:, None]
    if grad_s is not None:
        grad_x = grad_x + grad_s.to(dtype)
    grad_delta = grad_x * _per_row(row_scale, rows_per_scale)
    return (
        grad_x.to(s.dtype),
        (grad * normal).sum(0),
        grad.sum(0),
        grad_delta.sum(0),
        grad_delta.to(s.dtype),
    )
