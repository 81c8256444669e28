"""Attention at the counts of windows where CUDA's grids end, and at logits where a careless softmax gives NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiera_optim.attention import packed_attention
from hiera_optim.ops import attention, sdpa
from hiera_optim.ops.attention_reference import attention_backward_reference, attention_forward_reference

from .models import distance

pytestmark = pytest.mark.gpu
GROUPS = [65535, 65536, 70000]


def qkv_of(
    groups: int, tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(groups, tokens, 3, heads, dim, device="cuda", generator=generator).to(dtype)
    grad = torch.randn(groups, tokens, heads * dim, device="cuda", generator=generator).to(dtype)
    return qkv, grad


def check(o: Tensor, dqkv: Tensor, qkv: Tensor, grad: Tensor, limit: float = 6e-3) -> None:
    """Against float64, at both ends and around the limit."""
    for window in (slice(0, 64), slice(65500, 65570), slice(len(qkv) - 64, len(qkv))):
        some = qkv[window].double()
        assert distance(o[window], attention_forward_reference(some)) < limit
        assert distance(dqkv[window], attention_backward_reference(grad[window].double(), some)[0]) < limit
    assert torch.isfinite(dqkv).all()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_our_kernels(groups: int, tokens: int) -> None:
    qkv, grad = qkv_of(groups, tokens, 1, 32)
    o, lse = attention.attention_forward_lse(qkv)
    dqkv, dbias = attention.attention_backward(grad, qkv, 1, o, lse)
    check(o, dqkv, qkv, grad)
    assert distance(dbias[64:], dqkv.flatten(2).sum((0, 1), dtype=torch.float64)[64:]) < 6e-3


@pytest.mark.parametrize("groups", GROUPS)
def test_flash_where_our_kernels_do_not_reach(groups: int) -> None:
    qkv, grad = qkv_of(groups, 16, 1, 32)
    o = sdpa.attention_forward(qkv)
    check(o, sdpa.attention_backward(grad, qkv)[0], qkv, grad)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("backend", [None, "flash", "mem_efficient", "math"])
def test_the_plain_path(groups: int, backend: str | None) -> None:
    qkv, grad = qkv_of(groups, 16, 1, 32)
    qkv.requires_grad_()
    o = packed_attention(qkv, 1, backend)
    (dqkv,) = torch.autograd.grad(o, qkv, grad)
    check(o.detach(), dqkv, qkv.detach(), grad, 2e-2)


def _ours(qkv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = attention.attention_forward_lse(qkv)
    return o, attention.attention_backward(grad, qkv, 1, o, lse)[0]


def _flash(qkv: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return sdpa.attention_forward(qkv), sdpa.attention_backward(grad, qkv)[0]


@pytest.mark.parametrize("tokens", [16, 64, 76, 196, 784])
@pytest.mark.parametrize("run", [_ours, _flash])
def test_logits_of_a_thousand(run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], tokens: int) -> None:
    qkv, grad = qkv_of(8, tokens, 2, 96)
    qkv[:, :, 0] *= 1000
    logits = torch.einsum("gqhd,gkhd->ghqk", qkv[:, :, 0].double(), qkv[:, :, 1].double()) / 96**0.5
    assert logits.abs().max() > 1000
    o, dqkv = run(qkv, grad)
    assert torch.isfinite(o).all()
    assert torch.isfinite(dqkv).all()
    assert distance(o, attention_forward_reference(qkv.double())) < 1e-2
