"""Plain PyTorch oracle of the short-sequence attention kernels, and what a CPU runs.

Shapes: qkv is [G, T, 3, H, D], the packed output of the qkv projection for G windows of T tokens in z-order;
the output is [G, T // q_stride, H * D]. With q_stride > 1 the queries are the maxima over groups of q_stride
consecutive tokens, as in FAIR's MaskUnitAttention (Hiera, https://arxiv.org/abs/2306.00989); the first
maximal token of a group wins a tie and alone receives the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool_queries(q: Tensor, q_stride: int) -> tuple[Tensor, Tensor]:
    """Max-pool queries [G, T, H, D] over consecutive tokens.

    Returns the pooled queries [G, T // q_stride, H, D] and the winning token of each group, int64 of that
    shape.
    """
    groups, tokens, heads, dim = q.shape
    grouped = q.reshape(groups, tokens // q_stride, q_stride, heads, dim)
    best = grouped.max(dim=2, keepdim=True).values
    first = ((grouped == best) | grouped.isnan()).to(torch.uint8).argmax(dim=2, keepdim=True)
    return grouped.gather(2, first).squeeze(2), first.squeeze(2)


def attention_forward_reference(qkv: Tensor, q_stride: int = 1) -> Tensor:
    """softmax(pool(q) kᵀ / √D) v for every window and head: [G, T, 3, H, D] to [G, T // q_stride, H * D].

    Differentiable; computed in the dtype of `qkv` (the tests pass float64).
    """
    q, k, v = qkv.unbind(2)
    if q_stride > 1:
        q, _ = pool_queries(q, q_stride)
    scores = torch.einsum("gthd,gshd->ghts", q, k) * qkv.shape[-1] ** -0.5
    return torch.einsum("ghts,gshd->gthd", scores.softmax(dim=-1), v).flatten(2)


def attention_backward_reference(grad_o: Tensor, qkv: Tensor, q_stride: int = 1) -> tuple[Tensor, Tensor]:
    """Gradient of `attention_forward_reference`: (dqkv like qkv, dbias [3 * H * D] = column sums of dqkv).

    The column sums are the gradient of the qkv projection's bias; fp32, or fp64 for fp64 input. Their k part
    is zero but for rounding, since a shift of all keys does not change the softmax.
    """
    with torch.enable_grad():
        leaf = qkv.detach().requires_grad_()
        out = attention_forward_reference(leaf, q_stride)
        (dqkv,) = torch.autograd.grad(out, leaf, grad_o)
    wide = dqkv if dqkv.dtype == torch.float64 else dqkv.float()
    return dqkv, wide.flatten(2).sum(dim=(0, 1))
