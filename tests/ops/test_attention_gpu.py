"""The attention kernels as compiled for a GPU: bf16 against float64, and tensors past 2**31 elements."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.ops.attention import attention_backward, attention_forward, attention_forward_lse
from hiera_optim.ops.attention_config import AttentionConfig
from hiera_optim.ops.attention_reference import attention_backward_reference, attention_forward_reference
from tests.ops.kernel_testing import assert_close, poison_empty

pytestmark = [
    pytest.mark.gpu,
    # where the reference's backward is the first thing that autograd's thread runs
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def _check(
    qkv: torch.Tensor, grad_o: torch.Tensor, q_stride: int, window: slice, config: AttentionConfig | None = None
) -> None:
    """Compare the windows of a slice with float64."""
    limit = LIMIT[qkv.dtype]
    o, lse = attention_forward_lse(qkv, q_stride)
    some, some_grad = qkv[window].double(), grad_o[window].double()
    exact = attention_forward_reference(some, q_stride)
    assert_close("o", attention_forward(qkv, q_stride)[window], exact, limit)
    assert_close("o beside lse", o[window], exact, limit)
    dqkv, dbias = attention_backward(grad_o, qkv, q_stride, o, lse, config=config)
    exact_dqkv, _ = attention_backward_reference(some_grad, some, q_stride)
    assert_close("dqkv", dqkv[window], exact_dqkv, limit)
    sums = dqkv.flatten(2).sum((0, 1), dtype=torch.float32)
    q, _, v = (sums.chunk(3)[i] for i in range(3))
    magnitude = dqkv[:, :, 0].float().abs().sum((0, 1)).flatten()
    assert bool(((dbias.chunk(3)[0] - q).abs() <= limit * magnitude).all())
    assert_close("dbias of v", dbias.chunk(3)[2], v, limit)


@pytest.mark.parametrize(
    ("groups", "tokens", "heads", "dim", "q_stride"),
    [
        (33, 64, 1, 96, 1),
        (33, 64, 2, 96, 4),
        (2433, 16, 2, 96, 1),
        (33, 16, 4, 96, 4),
        (9, 76, 4, 96, 1),
        (9, 196, 16, 32, 1),
        (9, 76, 8, 72, 1),
        (9, 64, 4, 72, 4),
        (9, 76, 8, 64, 1),
        (9, 76, 4, 56, 1),
        (13, 8, 2, 96, 2),
        (13, 6, 1, 96, 1),
        (3, 304, 2, 96, 1),
        (3, 784, 4, 32, 1),
        (2, 1024, 1, 128, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_float64(
    groups: int,
    tokens: int,
    heads: int,
    dim: int,
    q_stride: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(groups, tokens, 3, heads, dim, device="cuda", dtype=dtype)
    grad_o = torch.randn(groups, tokens // q_stride, heads * dim, device="cuda", dtype=dtype) + 0.25
    poison_empty(monkeypatch)
    _check(qkv, grad_o, q_stride, slice(0, groups))


@pytest.mark.parametrize(("tokens", "q_stride"), [(16, 4), (76, 1)])
def test_float32_without_tf32(tokens: int, q_stride: int) -> None:
    torch.manual_seed(1)
    qkv = torch.randn(5, tokens, 3, 2, 96, device="cuda")
    grad_o = torch.randn(5, tokens // q_stride, 192, device="cuda") + 0.25
    _check(qkv, grad_o, q_stride, slice(0, 5))


@pytest.mark.parametrize(("tokens", "dim"), [(16, 96), (196, 32), (304, 64)])
def test_past_two_to_the_31_elements(tokens: int, dim: int) -> None:
    torch.manual_seed(2)
    heads = 2
    groups = 2**31 // (tokens * 3 * heads * dim) + 7
    qkv = torch.randn(groups, tokens, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
    assert qkv.numel() > 2**31
    grad_o = torch.randn(groups, tokens, heads * dim, device="cuda", dtype=torch.bfloat16)
    o, lse = attention_forward_lse(qkv)
    dqkv, _ = attention_backward(grad_o, qkv, 1, o, lse)
    for window in (slice(0, 5), slice(groups - 5, groups)):
        some = qkv[window].double()
        assert_close("o", o[window], attention_forward_reference(some), 6e-3)
        exact, _ = attention_backward_reference(grad_o[window].double(), some)
        assert_close("dqkv", dqkv[window], exact, 6e-3)
