"""Max over groups of rows against torch's max: values, ties, NaN, gradients, poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.ops import pooling
from hiera_optim.ops.pooling import (
    max_pool_backward,
    max_pool_backward_reference,
    max_pool_forward,
    max_pool_forward_reference,
)
from tests.ops.kernel_testing import Mutant, faithful_bf16, poison_empty


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    faithful_bf16(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "q", "columns"), [(1, 4, 96), (7, 2, 112), (130, 4, 100), (5, 8, 192), (3, 3, 7)])
def test_forward_and_gradient(groups: int, q: int, columns: int, dtype: torch.dtype) -> None:
    # Few distinct values, so that most groups have ties; the gradient must go to the first of the equal rows.
    x = (torch.randint(-3, 4, (groups * q, columns)) / 2).to(dtype).requires_grad_()
    want, want_index = x.unflatten(0, (-1, q)).max(dim=1)
    grad_y = torch.randn(groups, columns).to(dtype)
    want.backward(grad_y)
    y, index = max_pool_forward(x.detach(), q)
    assert torch.equal(y, want)
    assert index.dtype == torch.uint8
    assert torch.equal(index.long(), want_index)
    grad_x = max_pool_backward(grad_y, index, q)
    assert x.grad is not None
    assert torch.equal(grad_x, x.grad)


def test_nan_wins_and_infinities() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, -inf, nan], [nan, 2.0, -inf, 1.0], [3.0, nan, -inf, inf], [nan, inf, -inf, nan]])
    y, index = max_pool_forward(x, 4)
    want, want_index = max_pool_forward_reference(x, 4)
    assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(index, want_index)


def test_reference_is_autograd() -> None:
    x = torch.randint(0, 3, (12, 5)).double().requires_grad_()
    y = x.unflatten(0, (-1, 4)).max(dim=1).values
    grad_y = torch.randn_like(y).copy_(torch.arange(15.0).reshape(3, 5) + 1)
    y.backward(grad_y)
    got, index = max_pool_forward_reference(x.detach(), 4)
    assert torch.equal(got, y)
    assert x.grad is not None
    assert torch.equal(max_pool_backward_reference(grad_y, index, 4), x.grad)


@pytest.mark.parametrize("constants", [{"drop_programs": 1}, {"Q": 3}])
def test_a_broken_kernel_would_be_caught(monkeypatch: pytest.MonkeyPatch, constants: dict[str, int]) -> None:
    x = torch.randn(4 * 20, 96)
    want, want_index = max_pool_forward_reference(x, 4)
    grad_y = torch.randn(20, 96)
    want_grad = max_pool_backward_reference(grad_y, want_index, 4)
    monkeypatch.setattr(pooling, "_forward_kernel", Mutant(pooling._forward_kernel, **constants))
    monkeypatch.setattr(pooling, "_backward_kernel", Mutant(pooling._backward_kernel, **constants))
    assert not torch.equal(max_pool_forward(x, 4)[0], want)
    assert not torch.equal(max_pool_backward(grad_y, want_index, 4), want_grad)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="no whole groups of 4 rows"):
        max_pool_forward(torch.randn(6, 8), 4)
    with pytest.raises(ValueError, match="from 1 to 255"):
        max_pool_forward(torch.randn(256, 8), 256)
    with pytest.raises(ValueError, match="x must be contiguous"):
        max_pool_forward(torch.randn(8, 8).T, 4)
    with pytest.raises(TypeError, match="index must be uint8"):
        max_pool_backward(torch.randn(2, 8), torch.zeros(2, 8, dtype=torch.int32), 4)
