"""What every test here wants of the process: float32 without TF32, and memory given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _autograd_has_used_the_device() -> None:
    """cuBLAS warns when it is the first thing that autograd's thread runs; a kernel before it makes it silent."""
    if torch.cuda.is_available():
        x = torch.ones(2, device="cuda", requires_grad=True)
        (x * x).sum().backward()


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    """TF32 would put FAIR's own float32 three digits away from float64."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, value in zip(backends, before, strict=True):
        backend.allow_tf32 = value


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    """Several processes may share the GPU, and some tests look at how much memory is left."""
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
