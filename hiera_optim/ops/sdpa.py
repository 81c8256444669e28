"""Attention through PyTorch's fused kernels, for sequences too long for `hiera_optim.ops.attention`.

The same interface as the short-sequence kernels: packed qkv in, packed gradient and its column sums out. Uses the flash
kernel's own forward and backward operators, so that nothing but qkv has to be kept: the backward runs the forward again
for its log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WINDOWS = 65535
"""Flash launches a grid row a sequence, and CUDA has no more than this."""

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def _heads(qkv: Tensor, q_stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[G, T, 3, H, D] to q, k, v [G, H, T, D] and, when q is pooled, the index of each maximum."""
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    if q_stride == 1:
        return q, k, v, None
    G, H, T, D = q.shape
    pooled = q.reshape(G, H, T // q_stride, q_stride, D).max(3)
    return pooled.values, k, v, pooled.indices


def _chunks(windows: int) -> list[slice]:
    return [slice(i, i + MAX_WINDOWS) for i in range(0, windows, MAX_WINDOWS)]


def attention_forward(qkv: Tensor, q_stride: int = 1) -> Tensor:
    """[G, T, 3, H, D] to [G, T // q_stride, H * D]."""
    if len(qkv) > MAX_WINDOWS:
        return torch.cat([attention_forward(qkv[part], q_stride) for part in _chunks(len(qkv))])
    q, k, v, _ = _heads(qkv, q_stride)
    out: Tensor = flash_forward(q, k, v)[0]
    return out.transpose(1, 2).flatten(2).contiguous()


def attention_backward(grad: Tensor, qkv: Tensor, q_stride: int = 1) -> tuple[Tensor, Tensor]:
    """Gradient of qkv, and its column sums [3 * H * D] in fp32."""
    if len(qkv) > MAX_WINDOWS:
        chunks = [attention_backward(grad[part], qkv[part], q_stride) for part in _chunks(len(qkv))]
        return torch.cat([dqkv for dqkv, _ in chunks]), torch.stack([total for _, total in chunks]).sum(0)
    q, k, v, index = _heads(qkv, q_stride)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = flash_forward(q, k, v)
    grad_o = grad.view(*grad.shape[:2], *qkv.shape[3:]).transpose(1, 2)
    dq, dk, dv = flash_backward(grad_o, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset)
    if index is not None:
        full = torch.zeros((*dq.shape[:3], q_stride, dq.shape[3]), dtype=dq.dtype, device=dq.device)
        dq = full.scatter_(3, index.unsqueeze(3), dq.unsqueeze(3)).flatten(2, 3)
    dqkv = torch.stack((dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)), dim=2)
    return dqkv, dqkv.flatten(2).sum((0, 1), dtype=torch.float32)
