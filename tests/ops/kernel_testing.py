"""What the kernel tests share: errors, poisoned memory, broken kernels, and a mended bf16 in the
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over the reference's; infinite when shapes differ or a value is not
    finite."""
    if out.shape != reference.shape or not bool(torch.isfinite(out.double()).all()):
        return float("inf")
    exact = reference.detach().double()
    return float((out.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def assert_close(name: str, out: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    """Fail, naming the tensor, unless its relative error is below `limit`."""
    error = relative_error(out, reference)
    assert error < limit, f"{name}: relative error {error:.3g}, limit {limit:.3g}"


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch.empty and torch.empty_like return NaN (255 for bytes), so that an unwritten element
    shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs)))


class Mutant:
    """A kernel launched with other constants than its launcher gives, or on a smaller grid: a broken
    kernel."""

    def __init__(self, kernel: Any, *, drop_programs: int = 0, **constants: object) -> None:
        self.kernel, self.drop_programs, self.constants = kernel, drop_programs, constants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        smaller = (grid[0] - self.drop_programs, *grid[1:])

        def launch(*args: object, **kwargs: object) -> None:
            self.kernel[smaller](*args, **{**kwargs, **self.constants})

        return launch


def _convert_bf16(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """float32 to bf16 bits, rounding to nearest even as the hardware does, or bf16 bits to float32."""
    if source == tl.bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def faithful_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend bf16 in Triton's interpreter, which truncates when it rounds and multiplies bit patterns in
    `tl.dot`."""
    convert, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if {source, target} == {tl.bfloat16, tl.float32}:
            return _convert_bf16(values, source, target, rounding)
        return convert(values, source, target, rounding)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(_convert_bf16(handle.data, tl.bfloat16, tl.float32, None), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
