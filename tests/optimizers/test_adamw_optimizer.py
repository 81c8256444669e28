"""AdamW on flat buffers against torch.optim.AdamW, and its determinism and convergence."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from hiera_optim.optim import AdamW, no_decay_parameters


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 5))


def set_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in model.parameters():
        grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)


def torch_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    exempt = no_decay_parameters(model)
    return [
        {"params": [p for n, p in model.named_parameters() if n not in exempt], "weight_decay": weight_decay},
        {"params": [p for n, p in model.named_parameters() if n in exempt], "weight_decay": 0.0},
    ]


def test_equals_torch_in_float32_over_20_steps_with_a_schedule() -> None:
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(ours.named_parameters(), lr=1e-2, weight_decay=0.3, no_decay=no_decay_parameters(ours))
    reference = torch.optim.AdamW(torch_groups(theirs, 0.3), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        rate = 1e-2 * (1 + math.cos(step / 20 * math.pi))
        optimizer.lr.fill_(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)
    # The comparison can fail: weight decay of the exempt parameters alone is larger than its tolerance.
    assert (small_model()[1].weight - ours[1].weight).abs().max() > 0.1


def test_grad_scale_multiplies_the_gradient_and_leaves_it_alone() -> None:
    scaled, plain = small_model(), small_model()
    first, second = (AdamW(m.named_parameters(), lr=1e-2) for m in (scaled, plain))
    for step in range(5):
        set_gradients(scaled, step)
        set_gradients(plain, step, scale=0.25)
        before = first.flat_grads[0].clone()
        first.step(torch.tensor(0.25))
        second.step()
        assert torch.equal(before, first.flat_grads[0])
    torch.testing.assert_close(first.params.flat, second.params.flat, rtol=1e-6, atol=1e-6)


def test_bfloat16_with_master_equals_torch_on_a_float32_copy() -> None:
    ours = small_model().bfloat16()
    theirs = copy.deepcopy(ours).float()
    optimizer = AdamW(ours.named_parameters(), lr=1e-3, weight_decay=0.1, master=True)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        set_gradients(ours, step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    masters = optimizer.master_parameters()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(masters[name], q.detach(), rtol=1e-6, atol=1e-6, msg=name)
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, masters[name].bfloat16())


def test_pure_bfloat16_rounds_the_float32_update_once() -> None:
    model = small_model().bfloat16()
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    optimizer = AdamW(model.named_parameters(), lr=0.1, weight_decay=0.0, eps=1e-12, master=False)
    set_gradients(model, 0)
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad is not None
        # The first Adam step is lr * sign(gradient).
        expected = (before[name] - 0.1 * p.grad.float().sign()).bfloat16()
        torch.testing.assert_close(p.detach(), expected, rtol=2**-8, atol=1e-6)


def test_float32_accumulation_keeps_what_bfloat16_would_lose() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = AdamW(model.named_parameters(), lr=1e-3, fp32_accumulation=True)
    for _ in range(512):
        assert model.weight.grad is not None
        model.weight.grad.add_(1.0)
        optimizer.accumulate()
        assert not model.weight.grad.any()
    # In bfloat16, 256 + 1 = 256.
    torch.testing.assert_close(optimizer.flat_grads[0][:16], torch.full((16,), 512.0))
    torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(512.0 * 4))
    optimizer.step(zero_grad=True)
    assert not optimizer.grad_norm().item()


def test_accumulate_without_the_float32_sum_leaves_the_gradient() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-3, fp32_accumulation=True)
    set_gradients(model, 0)
    norm = optimizer.grad_norm()
    optimizer.accumulate()
    assert torch.equal(norm, optimizer.grad_norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_norm_equals_float64(dtype: torch.dtype) -> None:
    model = small_model().to(dtype)
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    set_gradients(model, 0)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))
    norm = optimizer.grad_norm()
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(exact, rel=1e-6)


def test_a_nonfinite_gradient_shows_in_the_norm() -> None:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-3)
    set_gradients(model, 0)
    model[0].weight.grad[3, 2] = math.inf
    assert not math.isfinite(optimizer.grad_norm().item())


def run(steps: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    model = small_model()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, no_decay=no_decay_parameters(model))
    x = torch.randn(64, 7, generator=torch.Generator().manual_seed(5))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(optimizer.grad_norm().clamp(min=1).reciprocal())
    return optimizer.params.flat.clone(), optimizer.state_dict(), optimizer.grad_norm()


def test_two_runs_are_bitwise_equal() -> None:
    (flat, state, norm), (other_flat, other_state, other_norm) = run(10), run(10)
    assert torch.equal(flat, other_flat)
    assert torch.equal(norm, other_norm)
    assert all(torch.equal(state[key], other_state[key]) for key in state)


def test_converges_on_a_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    target = x @ torch.randn(16, 4, generator=generator) + 0.5
    model = nn.Linear(16, 4)
    optimizer = AdamW(model.named_parameters(), lr=0.05, weight_decay=0.0)
    losses = []
    for step in range(200):
        optimizer.lr.fill_(0.05 * (1 - step / 200))
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-4 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"lr": math.nan}, "learning rate"),
        ({"lr": 1e-3, "betas": (0.9, 1.0)}, "betas"),
        ({"lr": 1e-3, "eps": 0.0}, "eps"),
        ({"lr": 1e-3, "weight_decay": -0.1}, "weight decay"),
        ({"lr": 1e-3, "no_decay": ["0.weigth"]}, "0.weigth"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(small_model().named_parameters(), **arguments)  # type: ignore[arg-type]
