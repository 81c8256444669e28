"""LayerNorm with residual against float64: outputs, every gradient and sum, odd shapes, poisoned outputs."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.ops import layer_norm
from hiera_optim.ops.layer_norm import RowConfig, add_layer_norm_backward, add_layer_norm_forward
from hiera_optim.ops.layer_norm_reference import (
    add_layer_norm_backward_reference,
    add_layer_norm_forward_reference,
)
from tests.ops.kernel_testing import Mutant, assert_close, faithful_bf16, poison_empty, relative_error

EPS = 1e-6
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    faithful_bf16(monkeypatch)


def _case(rows: int, columns: int, x_dtype: torch.dtype, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return {
        # An offset, so that a kernel that forgets the mean cannot pass.
        "x": (normal(rows, columns) * 2 + 3).to(x_dtype),
        "delta": normal(rows, columns).to(dtype),
        "weight": normal(columns).to(dtype),
        "bias": normal(columns).to(dtype),
        "grad_y": normal(rows, columns).to(dtype),
        "grad_s": normal(rows, columns).to(x_dtype),
    }


def _autograd(
    case: dict[str, torch.Tensor],
    s: torch.Tensor,
    row_scale: torch.Tensor | None,
    rows_per_scale: int,
    *,
    with_grad_s: bool,
) -> dict[str, torch.Tensor]:
    """Gradients by torch's own float64 autograd, from s as the forward kernel stored it."""
    residual = s.double().requires_grad_()
    weight = case["weight"].double().requires_grad_()
    bias = case["bias"].double().requires_grad_()
    y = torch.nn.functional.layer_norm(residual, residual.shape[1:], weight, bias, EPS)
    loss = (y * case["grad_y"].double()).sum()
    if with_grad_s:
        loss = loss + (residual * case["grad_s"].double()).sum()
    loss.backward()
    assert residual.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    factor = 1.0 if row_scale is None else row_scale.double().repeat_interleave(rows_per_scale)[:, None]
    grad_delta = residual.grad * factor
    return {
        "grad_x": residual.grad,
        "dweight": weight.grad,
        "dbias": bias.grad,
        "column_sum": grad_delta.sum(0),
        "grad_delta": grad_delta,
    }


@pytest.mark.parametrize(("rows", "columns"), [(1, 96), (7, 112), (130, 100), (13, 768), (3, 1152)])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "autocast"],
)
def test_against_float64(rows: int, columns: int, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    case = _case(rows, columns, x_dtype, dtype)
    s, y, mean, rstd = add_layer_norm_forward(
        case["x"], case["delta"], None, 1, case["weight"], case["bias"], EPS, dtype
    )
    want_s = case["x"].double() + case["delta"].double()
    assert s.dtype == x_dtype
    assert y.dtype == dtype
    assert_close("s", s, want_s, LIMIT[x_dtype])
    want_y = torch.nn.functional.layer_norm(s.double(), (columns,), case["weight"].double(), case["bias"].double(), EPS)
    assert_close("y", y, want_y, LIMIT[dtype])
    assert_close("mean", mean, s.double().mean(1), 1e-6)
    assert_close("rstd", rstd, (s.double().var(1, unbiased=False) + EPS).rsqrt(), 1e-6)

    want = _autograd(case, s, None, 1, with_grad_s=True)
    grad_x, dweight, dbias, column_sum, grad_delta = add_layer_norm_backward(
        case["grad_y"], case["grad_s"], s, mean, rstd, case["weight"], None, 1, delta_dtype=dtype
    )
    assert column_sum is not None
    assert grad_x.dtype == x_dtype
    assert_close("grad_x", grad_x, want["grad_x"], LIMIT[x_dtype])
    # Sums are taken before rounding, so they are float32-accurate for every dtype.
    assert_close("dweight", dweight, want["dweight"], 3e-6)
    assert_close("dbias", dbias, want["dbias"], 3e-6)
    assert_close("column_sum", column_sum, want["column_sum"], 3e-6)
    if x_dtype == dtype:
        assert grad_delta is None
    else:
        assert grad_delta is not None
        assert grad_delta.dtype == dtype
        assert_close("grad_delta", grad_delta, want["grad_delta"], LIMIT[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_scale(dtype: torch.dtype) -> None:
    rows, columns, per_scale = 35, 96, 5
    case = _case(rows, columns, dtype, dtype, seed=1)
    row_scale = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25, 0.5, 1.25])
    s, _, mean, rstd = add_layer_norm_forward(
        case["x"], case["delta"], row_scale, per_scale, case["weight"], case["bias"], EPS, dtype
    )
    factor = row_scale.double().repeat_interleave(per_scale)[:, None]
    assert_close("s", s, case["x"].double() + factor * case["delta"].double(), LIMIT[dtype])
    want = _autograd(case, s, row_scale, per_scale, with_grad_s=True)
    got = add_layer_norm_backward(case["grad_y"], case["grad_s"], s, mean, rstd, case["weight"], row_scale, per_scale)
    for name, out in zip(want, got, strict=True):
        assert out is not None
        assert_close(name, out, want[name], 3e-6 if out.dim() == 1 else LIMIT[dtype])
    assert got[4] is not None
    assert bool((got[4][:per_scale] == 0).all())


def test_without_delta_grad_s_or_column_sum() -> None:
    case = _case(9, 192, torch.bfloat16, torch.bfloat16, seed=2)
    s, y, mean, rstd = add_layer_norm_forward(
        case["x"], None, None, 1, case["weight"], case["bias"], EPS, torch.float32
    )
    assert s is case["x"]
    assert y.dtype == torch.float32
    want = _autograd(case, s, None, 1, with_grad_s=False)
    grad_x, dweight, dbias, column_sum, grad_delta = add_layer_norm_backward(
        case["grad_y"], None, s, mean, rstd, case["weight"], None, 1, with_column_sum=False
    )
    assert column_sum is None
    assert grad_delta is None
    assert_close("grad_x", grad_x, want["grad_x"], LIMIT[torch.bfloat16])
    assert_close("dweight", dweight, want["dweight"], 3e-6)
    assert_close("dbias", dbias, want["dbias"], 3e-6)


@pytest.mark.parametrize("config", [RowConfig(1, 1, 1, 0), RowConfig(4, 2, 3, 1), RowConfig(16, 8, 2, 5)])
def test_every_schedule_gives_the_same(config: RowConfig) -> None:
    case = _case(37, 112, torch.float32, torch.float32, seed=3)
    forward = [case["x"], case["delta"], None, 1, case["weight"], case["bias"], EPS, torch.float32]
    want = add_layer_norm_forward(*forward)  # type: ignore[arg-type]
    got = add_layer_norm_forward(*forward, config=config)  # type: ignore[arg-type]
    for name, a, b in zip(("s", "y", "mean", "rstd"), got, want, strict=True):
        assert_close(name, a, b, 1e-6)
    backward = [case["grad_y"], case["grad_s"], want[0], want[2], want[3], case["weight"], None, 1]
    first = add_layer_norm_backward(*backward)  # type: ignore[arg-type]
    again = add_layer_norm_backward(*backward)  # type: ignore[arg-type]
    other = add_layer_norm_backward(*backward, config=config)  # type: ignore[arg-type]
    for name, a, b, c in zip(("grad_x", "dweight", "dbias", "sum"), first[:4], again[:4], other[:4], strict=True):
        assert a is not None
        assert b is not None
        assert c is not None
        assert torch.equal(a, b), f"{name} differs between two runs"
        assert_close(name, c, a, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_is_autograd(dtype: torch.dtype) -> None:
    case = {name: value.to(dtype) for name, value in _case(11, 24, torch.float32, torch.float32).items()}
    row_scale = torch.full((11,), 1.5)
    s, y, mean, rstd = add_layer_norm_forward_reference(
        case["x"], case["delta"], row_scale, 1, case["weight"], case["bias"], EPS, dtype
    )
    want = _autograd(case, s, row_scale, 1, with_grad_s=True)
    got = add_layer_norm_backward_reference(case["grad_y"], case["grad_s"], s, mean, rstd, case["weight"], row_scale, 1)
    want_y = torch.nn.functional.layer_norm(s, (24,), case["weight"], case["bias"], EPS)
    assert_close("y", y, want_y, 1e-6)
    for name, out in zip(want, got, strict=True):
        assert_close(name, out, want[name], 1e-6)


FORWARD_MUTANTS = [{"HAS_DELTA": False}, {"HAS_SCALE": False}, {"C": 111}]
BACKWARD_MUTANTS = [{"HAS_GRAD_S": False}, {"drop_programs": 1}, {"HAS_SCALE": False}, {"STORE_DELTA": False}]


def _worst_errors(seed: int = 4) -> tuple[float, float]:
    """Worst relative error of forward's and of backward's results."""
    case = _case(40, 112, torch.float32, torch.float32, seed)
    row_scale = torch.linspace(0.5, 2.0, 8)
    forward = (case["x"], case["delta"], row_scale, 5, case["weight"], case["bias"], EPS, torch.float32)
    want_forward = add_layer_norm_forward_reference(*forward)
    got_forward = add_layer_norm_forward(*forward)
    s, _, mean, rstd = want_forward
    backward = (case["grad_y"], case["grad_s"], s, mean, rstd, case["weight"], row_scale, 5)
    got_backward = add_layer_norm_backward(*backward)
    want_backward = add_layer_norm_backward_reference(*backward)
    return (
        max(relative_error(a, b) for a, b in zip(got_forward, want_forward, strict=True)),
        max(relative_error(a, b) for a, b in zip(got_backward, want_backward, strict=True) if a is not None),
    )


def test_a_broken_kernel_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _worst_errors()
    assert forward < 2e-6
    assert backward < 3e-6
    for constants in FORWARD_MUTANTS:
        with monkeypatch.context() as patch:
            patch.setattr(layer_norm, "_forward_kernel", Mutant(layer_norm._forward_kernel, **constants))  # type: ignore[arg-type]
            assert _worst_errors()[0] > 1e-2, constants
    for constants in BACKWARD_MUTANTS:
        with monkeypatch.context() as patch:
            patch.setattr(layer_norm, "_backward_kernel", Mutant(layer_norm._backward_kernel, **constants))  # type: ignore[arg-type]
            assert _worst_errors()[1] > 1e-2, constants


def test_arguments_that_do_not_fit() -> None:
    case = _case(6, 16, torch.float32, torch.float32)
    x, w = case["x"], case["weight"]
    with pytest.raises(ValueError, match="x must be contiguous"):
        add_layer_norm_forward(x.T.contiguous().T, None, None, 1, w, w, EPS, torch.float32)
    with pytest.raises(ValueError, match="delta has shape"):
        add_layer_norm_forward(x, x[:3], None, 1, w, w, EPS, torch.float32)
    with pytest.raises(ValueError, match="do not make 6 rows"):
        add_layer_norm_forward(x, x, torch.ones(4), 2, w, w, EPS, torch.float32)
    with pytest.raises(TypeError, match="row_scale must be float32"):
        add_layer_norm_forward(x, x, torch.ones(3, dtype=torch.float64), 2, w, w, EPS, torch.float32)
    with pytest.raises(ValueError, match="at least one row"):
        add_layer_norm_forward(x[:0], None, None, 1, w, w, EPS, torch.float32)
