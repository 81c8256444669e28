"""What every kernel launcher needs to know of a device, and the checks it makes of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

T = TypeVar("T")

# Stand-ins for Triton's interpreter on the CPU: small enough that a persistent kernel's loop really loops in
# tests.
INTERPRETER_MULTIPROCESSORS = 2
INTERPRETER_CAPABILITY = (0, 0)


@functools.cache
def _cuda_properties(index: int) -> tuple[int, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, (properties.major, properties.minor)


def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors of `device`."""
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return _cuda_properties(torch.cuda.current_device() if device.index is None else device.index)[0]


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of `device`, e.g. (9, 0) for Hopper; (0, 0) for the interpreter on the CPU."""
    if device.type != "cuda":
        return INTERPRETER_CAPABILITY
    return _cuda_properties(torch.cuda.current_device() if device.index is None else device.index)[1]


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Makes the tensor's GPU the current one: Triton launches there, wherever its tensors are; PyTorch does not."""
    context: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return context


def outside_graph_pools(make: Callable[[], T], device: torch.device) -> T:
    """What `make` returns, its tensors in ordinary memory: for tables that are built at first use and kept.

    torch.compile's CUDA graphs give a thread's allocations to their own pool while they warm up and record, and take
    what is left there for a leak. Allocations of another thread are not touched. Waits for the device, once.
    """
    if device.type != "cuda":
        return make()

    def run() -> T:
        with torch.cuda.device(device):
            made = make()
            torch.cuda.current_stream().synchronize()
            return made

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def require_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError naming the first tensor that is not contiguous: the kernels compute offsets from
    shapes."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError when `tensor` has another shape than `shape`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
