"""The AdamW kernel in Triton's interpreter against its PyTorch oracle and against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hiera_optim.optim import adamw_kernel
from hiera_optim.optim.adamw import AdamWSettings, adamw_reference
from tests.ops.broken import broken_module

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decay_end=700)


def problem(numel: int, dtype: torch.dtype, master: bool, seed: int = 0) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def randn() -> Tensor:
        return torch.randn(numel, generator=generator)

    weights = randn()
    return {
        "param": weights.to(dtype),
        "grad": (randn() * 0.1).to(dtype),
        "exp_avg": randn() * 0.1,
        "exp_avg_sq": randn().square() * 0.01,
        "master": weights.clone() if master else None,
        "lr": torch.tensor(1e-2),
        "step": torch.tensor(3),
        "grad_scale": torch.tensor(0.37),
    }


def clone(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.clone() for name, t in tensors.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def float64_update(tensors: dict[str, Tensor | None], settings: AdamWSettings) -> dict[str, Tensor]:
    """AdamW as Algorithm 2 of arXiv 1711.05101 has it, in float64."""
    t = {name: tensor.double() for name, tensor in tensors.items() if tensor is not None}
    g, step, lr = t["grad"] * t.get("grad_scale", 1.0), t["step"].item(), t["lr"].item()
    m = settings.beta1 * t["exp_avg"] + (1 - settings.beta1) * g
    v = settings.beta2 * t["exp_avg_sq"] + (1 - settings.beta2) * g**2
    decay = torch.zeros_like(m)
    decay[: settings.decay_end] = settings.weight_decay
    weights = t.get("master", t["param"])
    hat_m, hat_v = m / (1 - settings.beta1**step), v / (1 - settings.beta2**step)
    p = weights - lr * decay * weights - lr * hat_m / (hat_v.sqrt() + settings.eps)
    return {"exp_avg": m, "exp_avg_sq": v, "master": p, "param": p}


@pytest.mark.parametrize("numel", [1, 255, 1024, 1025, 2816])
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("zero_grad", [False, True])
def test_equals_reference_and_float64(numel: int, dtype: torch.dtype, master: bool, zero_grad: bool) -> None:
    settings = replace(SETTINGS, decay_end=min(SETTINGS.decay_end, numel))
    start = problem(numel, dtype, master)
    ours, oracle = clone(start), clone(start)
    adamw_kernel.adamw_triton(**ours, settings=settings, zero_grad=zero_grad)  # type: ignore[arg-type]
    adamw_reference(**oracle, settings=settings, zero_grad=zero_grad)  # type: ignore[arg-type]
    exact = float64_update(start, settings)
    for name in ("exp_avg", "exp_avg_sq", "master", "param"):
        a, b = ours[name], oracle[name]
        if a is None or b is None:
            continue
        if a.dtype == torch.bfloat16:
            # The interpreter cuts where the hardware rounds: one unit in the last place.
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-30)
        else:
            assert relative_error(a, b) < 1e-6, name
            assert relative_error(a, exact[name]) < 1e-6, name
    gradient, before = ours["grad"], start["grad"]
    assert gradient is not None
    assert before is not None
    assert torch.equal(gradient, torch.zeros_like(before) if zero_grad else before)


def test_float32_gradient_with_bfloat16_weights() -> None:
    """As after accumulation in float32."""
    start = problem(600, torch.bfloat16, master=True)
    assert start["grad"] is not None
    start["grad"] = start["grad"].float() * 1.001
    ours, oracle = clone(start), clone(start)
    settings = replace(SETTINGS, decay_end=300)
    adamw_kernel.adamw_triton(**ours, settings=settings)  # type: ignore[arg-type]
    adamw_reference(**oracle, settings=settings)  # type: ignore[arg-type]
    torch.testing.assert_close(ours["master"], oracle["master"], rtol=1e-6, atol=1e-7)


def test_elements_beyond_the_end_and_padding_are_untouched() -> None:
    """The buffers are slices of larger ones filled with NaN; zero padding stays zero."""
    numel = 1100
    start = problem(numel, torch.bfloat16, master=True)
    wide: dict[str, Tensor] = {}
    ours: dict[str, Tensor | None] = clone(start)
    for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master"):
        source = start[name]
        assert source is not None
        source[-76:] = 0
        wide[name] = torch.full((2048 + 256,), math.nan, dtype=source.dtype)
        wide[name][256 : 256 + numel] = source
        ours[name] = wide[name][256 : 256 + numel]
    adamw_kernel.adamw_triton(**ours, settings=SETTINGS, zero_grad=True)  # type: ignore[arg-type]
    for name, tensor in wide.items():
        assert tensor[:256].isnan().all(), name
        assert tensor[256 + numel :].isnan().all(), name
        assert tensor[256 : 256 + numel].isfinite().all(), name
        assert not tensor[256 + numel - 76 : 256 + numel].any(), name


@pytest.mark.parametrize("step", [1, 2, 3, 1000, 2500, 1_000_000])
def test_bias_correction_from_the_first_to_the_millionth_step(step: int) -> None:
    start = problem(300, torch.float32, master=False)
    start["step"] = torch.tensor(step)
    settings = AdamWSettings(beta1=0.9, beta2=0.9999, eps=1e-8, weight_decay=0.0, decay_end=300)
    ours = clone(start)
    adamw_kernel.adamw_triton(**ours, settings=settings)  # type: ignore[arg-type]
    before, exact, after = start["param"], float64_update(start, settings)["param"], ours["param"]
    assert before is not None
    assert after is not None
    # What float32 weights can show of an update of this size, plus the update's own error.
    change = exact - before.double()
    assert (after.double() - exact).abs().max() < 2e-7 * (before.abs().max() + 5 * change.abs().max())


def test_without_momentum_and_scale() -> None:
    start = problem(64, torch.float32, master=False)
    start["grad_scale"] = None
    settings = AdamWSettings(beta1=0.0, beta2=0.95, eps=1e-8, weight_decay=0.0, decay_end=0)
    ours = clone(start)
    adamw_kernel.adamw_triton(**ours, settings=settings)  # type: ignore[arg-type]
    assert torch.equal(ours["exp_avg"], start["grad"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offsets < decay_end", "offsets <= decay_end"),
        ("g *= tl.load(grad_scale_ptr)", "g *= 1.0"),
        ("(1.0 - BETA2) * g * g", "(1.0 - BETA2) * tl.abs(g)"),
        ("lr * correction2 / correction1", "lr / correction1"),
        ("eps * correction2", "eps"),
        ("_one_minus_power(step, LOG_BETA1)", "_one_minus_power(step + 1.0, LOG_BETA1)"),
    ],
)
def test_a_broken_kernel_is_caught(old: str, new: str) -> None:
    """Proof that the kernel's source is what runs, and that the tolerance can fail."""
    start = problem(900, torch.float32, master=False)
    assert start["exp_avg_sq"] is not None
    start["exp_avg_sq"] *= 1e-8
    settings = replace(SETTINGS, eps=1e-2)
    errors = []
    for module in (adamw_kernel, broken_module("hiera_optim.optim.adamw_kernel", old, new)):
        ours = clone(start)
        module.adamw_triton(**ours, settings=settings)
        exact = float64_update(start, settings)
        errors.append(
            max(
                (ours[name].double() - exact[name]).abs().max().item()  # type: ignore[union-attr]
                for name in ("exp_avg", "exp_avg_sq", "param")
            )
        )
    assert errors[0] < 1e-6
    assert errors[1] > 1e-4
