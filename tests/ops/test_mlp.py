"""GELU kernels and fused GEMMs against float64: outputs, column sums, odd shapes, poisoned outputs, broken
kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiera_optim.ops import column_sum as column_sum_module
from hiera_optim.ops import linear_gelu, mlp
from hiera_optim.ops.column_sum import column_sum, column_sum_reference, sum_partials
from hiera_optim.ops.gelu import gelu_and_derivative_reference
from hiera_optim.ops.linear_gelu import GemmConfig, linear_gelu_backward, linear_gelu_forward
from hiera_optim.ops.mlp import (
    bias_gelu_forward,
    bias_gelu_forward_reference,
    gelu_backward,
    gelu_backward_reference,
    use_fused,
)
from tests.ops.kernel_testing import Mutant, assert_close, faithful_bf16, poison_empty, relative_error

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    faithful_bf16(monkeypatch)


def _normal(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 384), (7, 112), (130, 100)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_gelu(rows: int, columns: int, dtype: torch.dtype, with_bias: bool) -> None:
    h = _normal(0, rows, columns, dtype=dtype, scale=2.0)
    bias = _normal(1, columns, dtype=dtype) if with_bias else None
    want = bias_gelu_forward_reference(h.double(), None if bias is None else bias.double())
    a, gprime = bias_gelu_forward(h, bias)
    assert a.dtype == gprime.dtype == dtype
    assert_close("gelu", a, want[0], LIMIT[dtype])
    assert_close("gelu'", gprime, want[1], LIMIT[dtype])
    again, _ = bias_gelu_forward(h, bias, out=h)
    assert again is h
    assert torch.equal(again, a)


def test_gelu_is_exact_to_bf16() -> None:
    """Every bf16 in [-8, 8]: values within bf16's rounding, relatively, also in the tail; then float32
    through erf."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    h = bits.view(torch.bfloat16)
    h = h[h.abs() <= 8].reshape(1, -1)
    exact, exact_derivative = gelu_and_derivative_reference(h.double())
    # erf(x) + 1 cancels in the tail even in float64's last digits; erfc does not.
    exact = 0.5 * h.double() * torch.erfc(-h.double() * 0.5**0.5)
    a, gprime = bias_gelu_forward(h, None)
    large = exact.abs() > 1e-30
    assert float(((a.double() - exact) / exact)[large].abs().max()) < 2**-8
    assert float((a != exact.bfloat16())[large].float().mean()) < 2e-3
    assert float((gprime.double() - exact_derivative).abs().max()) < 2**-8
    assert float((gprime != exact_derivative.bfloat16()).float().mean()) < 2e-3
    a, gprime = bias_gelu_forward(h.float(), None)
    assert float((a.double() - exact).abs().max()) < 1e-6
    assert float((gprime.double() - exact_derivative).abs().max()) < 1e-6


def test_gelu_of_extremes() -> None:
    h = torch.tensor([[3e38, -3e38, 0.0, -0.0, float("nan"), -30.0, 30.0, 1e-40]]).bfloat16()
    with np.errstate(over="ignore", invalid="ignore"):
        a, gprime = bias_gelu_forward(h, None)
    assert a[0, [0, 1, 2, 3, 5, 6]].tolist() == [h[0, 0].item(), 0.0, 0.0, 0.0, 0.0, 30.0]
    assert gprime[0, [0, 1, 5, 6]].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert bool(a[0, 4].isnan())
    assert bool(gprime[0, 4].isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 384), (7, 112), (130, 100), (300, 64)])
def test_gelu_backward_and_column_sum(rows: int, columns: int, dtype: torch.dtype) -> None:
    da = _normal(2, rows, columns, dtype=dtype) + 0.25
    gprime = _normal(3, rows, columns, dtype=dtype)
    want, want_sum = gelu_backward_reference(da.double(), gprime.double())
    dh, sums = gelu_backward(da, gprime)
    assert dh.dtype == dtype
    assert sums.dtype == torch.float32
    assert_close("dh", dh, want, LIMIT[dtype])
    assert_close("column sum", sums, want_sum, 1e-6)
    total = column_sum(da)
    assert_close("column_sum", total, column_sum_reference(da.double()), 1e-6)
    in_place, same_sums = gelu_backward(da, gprime, in_place=True)
    assert in_place is da
    assert torch.equal(in_place, dh)
    assert torch.equal(same_sums, sums)


@pytest.mark.parametrize(("partials", "width"), [(1, 3), (17, 300), (1030, 40), (300, 2100)])
def test_sum_partials(partials: int, width: int) -> None:
    values = _normal(4, partials, width, dtype=torch.float32)
    assert_close("sum", sum_partials(values), values.double().sum(0), 2e-6)


SMALL = GemmConfig(block_n=32, block_f=64, block_k=32, group=2, num_warps=4, num_stages=2)
CONFIGS = {
    "default": None,
    "pointers": SMALL,
    "pointers-halves-persistent": GemmConfig(32, 64, 32, 3, 4, 2, halves=True, programs_per_multiprocessor=1),
    "pointers-early": GemmConfig(32, 64, 32, 2, 4, 2, early_factor=True),
    "tma": GemmConfig(32, 64, 32, 2, 4, 2, tma=True),
    "tma-halves-persistent": GemmConfig(32, 64, 64, 2, 4, 2, tma=True, halves=True, programs_per_multiprocessor=1),
    "tma-early": GemmConfig(32, 64, 32, 2, 4, 2, tma=True, early_factor=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 96, 112), (7, 112, 100), (130, 100, 136)])
@pytest.mark.parametrize("config", CONFIGS)
def test_fused_gemms(rows: int, inner: int, outer: int, config: str, dtype: torch.dtype) -> None:
    chosen = CONFIGS[config]
    x = _normal(5, rows, inner, dtype=dtype)
    w1 = _normal(6, outer, inner, dtype=dtype, scale=inner**-0.5)
    bias = _normal(7, outer, dtype=dtype)
    dy = _normal(8, rows, inner, dtype=dtype)
    w2 = _normal(9, inner, outer, dtype=dtype, scale=outer**-0.5)
    if chosen is not None and chosen.tma and (inner % 8 or outer % 8) and dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="tensor maps cannot describe"):
            linear_gelu_forward(x, w1, bias, config=chosen)
        return
    want = bias_gelu_forward_reference(x.double() @ w1.double().T, bias.double())
    a, gprime = linear_gelu_forward(x, w1, bias, config=chosen)
    assert a.dtype == gprime.dtype == dtype
    assert_close("gelu", a, want[0], LIMIT[dtype])
    assert_close("gelu'", gprime, want[1], LIMIT[dtype])
    want_dh, want_sum = gelu_backward_reference(dy.double() @ w2.double(), gprime.double())
    dh, sums = linear_gelu_backward(dy, w2, gprime, config=chosen)
    assert dh.dtype == dtype
    assert_close("dh", dh, want_dh, LIMIT[dtype])
    assert_close("column sum", sums, want_sum, 2e-6)
    if rows < 100:
        assert torch.equal(linear_gelu_backward(dy, w2, gprime, config=chosen)[1], sums)


def test_backward_is_autograd_of_forward() -> None:
    """The two halves as the MLP uses them, against torch's gradients of fc1, GELU, fc2 in float64."""
    x = _normal(10, 33, 48, dtype=torch.float32)
    w1, b1 = _normal(11, 96, 48, dtype=torch.float32), _normal(12, 96, dtype=torch.float32)
    w2 = _normal(13, 48, 96, dtype=torch.float32)
    dy = _normal(14, 33, 48, dtype=torch.float32)
    leaves = [t.double().requires_grad_() for t in (x, w1, b1)]
    hidden = torch.nn.functional.gelu(torch.nn.functional.linear(*leaves))
    (hidden @ w2.double().T * dy.double()).sum().backward()
    _, gprime = linear_gelu_forward(x, w1, b1)
    dh, sums = linear_gelu_backward(dy, w2, gprime)
    want_x, want_w, want_b = (leaf.grad for leaf in leaves)
    assert want_x is not None
    assert want_w is not None
    assert want_b is not None
    assert_close("dx", dh @ w1, want_x, 3e-6)
    assert_close("dw1", dh.T @ x, want_w, 3e-6)
    assert_close("db1", sums, want_b, 3e-6)


def _fused_errors() -> tuple[float, float]:
    x, w = _normal(15, 70, 96, dtype=torch.float32), _normal(16, 128, 96, dtype=torch.float32, scale=0.1)
    bias, dy = _normal(17, 128, dtype=torch.float32), _normal(18, 70, 96, dtype=torch.float32)
    want = bias_gelu_forward_reference(x.double() @ w.double().T, bias.double())
    forward = linear_gelu_forward(x, w, bias, config=SMALL)
    w2 = w.T.contiguous()
    dh, dbias = gelu_backward_reference(dy.double() @ w2.double(), want[1])
    backward = linear_gelu_backward(dy, w2, want[1].float(), config=SMALL)
    return (
        max(relative_error(a, b) for a, b in zip(forward, want, strict=True)),
        max(relative_error(a, b) for a, b in zip(backward, (dh, dbias), strict=True)),
    )


@pytest.mark.parametrize("constants", [{"drop_programs": 1}, {"K": 95}, {"GROUP": 1, "K": 64}])
def test_a_broken_gemm_would_be_caught(monkeypatch: pytest.MonkeyPatch, constants: dict[str, int]) -> None:
    forward, backward = _fused_errors()
    assert forward < 1e-6
    assert backward < 2e-6
    monkeypatch.setattr(linear_gelu, "forward_kernel", Mutant(linear_gelu.forward_kernel, **constants))
    monkeypatch.setattr(linear_gelu, "backward_kernel", Mutant(linear_gelu.backward_kernel, **constants))
    forward, backward = _fused_errors()
    assert forward > 1e-2
    assert backward > 1e-2


def test_broken_elementwise_kernels_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    h, bias = _normal(19, 40, 100, dtype=torch.float32), _normal(20, 100, dtype=torch.float32)
    want = bias_gelu_forward_reference(h.double(), bias.double())[0]
    kernel = mlp._bias_gelu_kernel
    for constants in ({"HAS_BIAS": False}, {"drop_programs": 1}):
        monkeypatch.setattr(mlp, "_bias_gelu_kernel", Mutant(kernel, **constants))  # type: ignore[arg-type]
        assert relative_error(bias_gelu_forward(h, bias)[0], want) > 1e-2, constants
    # At float32 the polynomial's error must show: its tolerance is the one that tells erf from it.
    monkeypatch.setattr(mlp, "_bias_gelu_kernel", Mutant(kernel, EXACT=False))
    want = bias_gelu_forward_reference(h.double(), bias.double())[1]
    assert relative_error(bias_gelu_forward(h, bias)[1], want) > 1e-7
    want_sum = gelu_backward_reference(h.double(), h.double())[1]
    summing = column_sum_module._column_sum_kernel
    for constants in ({"MULTIPLY": False}, {"drop_programs": 1}):
        monkeypatch.setattr(column_sum_module, "_column_sum_kernel", Mutant(summing, **constants))  # type: ignore[arg-type]
        assert relative_error(gelu_backward(h, h)[1], want_sum) > 1e-2, constants


def test_use_fused() -> None:
    assert use_fused(9728, 384, 1536, (9, 0))
    assert not use_fused(9728, 100, 400, (9, 0))
    assert not use_fused(9728, 384, 1536, (7, 5))
    assert not use_fused(9728, 8192, 32768, (9, 0), backward=True)


def test_arguments_that_do_not_fit() -> None:
    x, w, bias = torch.randn(4, 16), torch.randn(32, 16), torch.randn(32)
    with pytest.raises(ValueError, match="w must be contiguous"):
        linear_gelu_forward(x, torch.randn(16, 32).T, bias)
    with pytest.raises(ValueError, match="bias has shape"):
        linear_gelu_forward(x, w, bias[:3])
    with pytest.raises(ValueError, match="one dtype"):
        linear_gelu_forward(x, w.bfloat16(), bias)
    with pytest.raises(ValueError, match="gprime has shape"):
        linear_gelu_backward(x, w.T.contiguous(), torch.randn(4, 31))
    with pytest.raises(ValueError, match="at least one row"):
        column_sum(x[:0])
    with pytest.raises(ValueError, match="factor has shape"):
        gelu_backward(x, x[:2])
