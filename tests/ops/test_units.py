"""Row copies of whole mask units against plain PyTorch, gradients against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.ops import units

CASES = [(1, 4, 1, 8, 4), (3, 7, 3, 20, 5), (18, 5, 2, 96, 48), (2, 9, 8, 1100, 100)]


def draw(B: int, M: int, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.rand(B, M).argsort(1)
    return order[:, :L].sort(1).values, order[:, L:].sort(1).values


@pytest.mark.parametrize(("B", "M", "L", "E", "C"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_position(B: int, M: int, L: int, E: int, C: int, dtype: torch.dtype) -> None:
    keep, _ = draw(B, M, L)
    x, pos = torch.randn(B, L, E).to(dtype), torch.randn(M, E).to(dtype)
    want = units.add_position_reference(x.double(), pos.double(), keep)
    torch.testing.assert_close(units.add_position(x, pos, keep), want.to(dtype))
    grad = torch.randn(B, L, E).to(dtype)
    p = pos.double().requires_grad_()
    units.add_position_reference(x.double(), p, keep).backward(grad.double())
    assert p.grad is not None
    got = units.add_position_backward(grad, units.unit_slots(keep, M))
    torch.testing.assert_close(got, p.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("B", "M", "L", "E", "C"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assemble(B: int, M: int, L: int, E: int, C: int, dtype: torch.dtype) -> None:
    keep, _ = draw(B, M, L)
    slot = units.unit_slots(keep, M)
    parts = [torch.randn(shape).to(dtype) for shape in ((B, L, E), (C,), (M, E))]
    wide = [t.double().requires_grad_() for t in parts]
    want = units.assemble_reference(*wide, slot)
    torch.testing.assert_close(units.assemble(*parts, slot), want.detach().to(dtype))
    grad = torch.randn(B, M, E).to(dtype)
    want.backward(grad.double())
    for got, w in zip(units.assemble_backward(grad, slot, L, C), wide, strict=True):
        assert w.grad is not None
        torch.testing.assert_close(got.float(), w.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("B", "M", "L", "E", "C"), CASES)
def test_gather_units_is_its_own_gradient(B: int, M: int, L: int, E: int, C: int) -> None:
    _, drop = draw(B, M, L)
    slot = units.unit_slots(drop, M)
    x = torch.randn(B, M, E)
    got = units.gather_units(x, drop)
    assert torch.equal(got, units.gather_units_reference(x, drop))
    wide = x.double().requires_grad_()
    grad = torch.randn_like(got)
    units.gather_units_reference(wide, drop).backward(grad.double())
    assert wide.grad is not None
    assert torch.equal(units.gather_units(grad, slot), wide.grad.float())
