"""The two GEMMs of an MLP that end in GELU work, with that work done before the result leaves the chip.

Forward, fc1:   h = x @ w.T + bias;  stores gelu(h) and gelu'(h), never h.      x [N, K], w [F, K], bias [F]
Backward, fc2:  dh = (dy @ w2) * gelu'(h), and the column sums of dh.           dy [N, K], w2 [K, F], gelu'
[N, F]

Both have a short inner dimension (K = C, F = 4C), so the epilogue costs as much as the multiplication: two
programs share a multiprocessor, one multiplying while the other is in its epilogue. Shape letters: N rows, K
inner, F outer.
"""

from __future__ import annotations

import dataclasses

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from hiera_optim.ops._launch import capability, ceil_div, multiprocessors, require_contiguous, require_shape
from hiera_optim.ops.batched_sums import new_partials
from hiera_optim.ops.column_sum import sum_partials
from hiera_optim.ops.linear_gelu_kernels import backward_kernel, forward_kernel

__all__ = ["GemmConfig", "gemm_config", "linear_gelu_backward", "linear_gelu_forward", "supports_tma"]


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile and schedule of a fused GEMM.

    `block_n` rows by `block_f` columns a tile, `block_k` of the inner dimension a step; `group` row tiles
    share a pass over the columns (L2 locality); `tma`: tensor-map loads and stores (Hopper and later), else
    cp.async; `halves`: the epilogue works on one half of the tile's columns at a time (fewer registers, less
    shared memory); `programs_per_multiprocessor`: size of a persistent grid, 0 for one program a tile;
    `early_factor`: backward reads gelu' before it multiplies; `max_registers`: a limit a thread.
    """

    block_n: int = 128
    block_f: int = 128
    block_k: int = 64
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = False
    halves: bool = False
    programs_per_multiprocessor: int = 0
    early_factor: bool = False
    max_registers: int | None = None


def supports_tma(inner: int, outer: int, element_size: int, device: torch.device) -> bool:
    """Whether tensor maps can describe the operands: rows of a multiple of 16 bytes, Hopper or later."""
    aligned = inner * element_size % 16 == 0 and outer * element_size % 16 == 0
    return aligned and (device.type != "cuda" or capability(device) >= (9, 0))


def gemm_config(
    inner: int, outer: int, dtype: torch.dtype, device: torch.device, *, backward: bool = False
) -> GemmConfig:
    """The default tile for a shape on a device."""
    major, minor = capability(device)
    if device.type != "cuda":
        return GemmConfig(block_n=32, block_f=64, block_k=32, group=2, num_warps=4, num_stages=2)
    if dtype == torch.float32:
        return GemmConfig(block_n=64, block_f=64, block_k=32, num_warps=4, num_stages=2)
    block_k = 32 if inner % 64 in range(1, 33) else 64
    if (major, minor) in ((8, 6), (8, 9)) or major == 12:
        # 99 KB of shared memory: 3 stages of 128 x 32 by 32 x 128 are 48 KB, so two programs fit.
        return GemmConfig(block_k=32, num_warps=8, num_stages=3)
    # Halves keep a program of 8 warps at 128 registers or fewer on Hopper, so that two of them share a
    # multiprocessor.
    tma = supports_tma(inner, outer, dtype.itemsize, device)
    if backward and tma:
        # 65 KB of shared memory and 4 warps: three programs share a multiprocessor. 122 us against 128 with 8 warps
        # and 3 stages at 25088 x 512 x 2048 on an H200, and 95 against 106 at 155648 x 96 x 384.
        return GemmConfig(block_k=block_k, num_warps=4, num_stages=2, tma=True, halves=True)
    return GemmConfig(block_k=block_k, tma=tma, halves=tma)


def _grid(num_rows: int, outer: int, config: GemmConfig, device: torch.device) -> tuple[int]:
    tiles = ceil_div(num_rows, config.block_n) * ceil_div(outer, config.block_f)
    if config.programs_per_multiprocessor == 0:
        return (tiles,)
    return (min(tiles, config.programs_per_multiprocessor * multiprocessors(device)),)


def _check_tma(config: GemmConfig, inner: int, outer: int, x: torch.Tensor) -> None:
    if config.tma and not supports_tma(inner, outer, x.element_size(), x.device):
        raise ValueError(f"tensor maps cannot describe rows of {inner} or {outer} {x.dtype} elements on {x.device}")


def linear_gelu_forward(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, *, config: GemmConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """gelu(x @ w.T + bias) and gelu' there: x [N, K], w [F, K], bias [F] -> ([N, F], [N, F]), all in x's
    dtype.

    Raises ValueError for shapes that do not fit, tensors that are not contiguous, or w of another dtype than
    x.
    """
    if x.dim() != 2 or x.shape[0] == 0:
        raise ValueError(f"x must be a matrix with at least one row, got shape {tuple(x.shape)}")
    num_rows, inner = x.shape
    outer = w.shape[0]
    require_shape("w", w, (outer, inner))
    require_shape("bias", bias, (outer,))
    require_contiguous(x=x, w=w, bias=bias)
    if w.dtype != x.dtype:
        raise ValueError(f"w is {w.dtype} and x is {x.dtype}: they must be of one dtype")
    config = config or gemm_config(inner, outer, x.dtype, x.device)
    _check_tma(config, inner, outer, x)
    gelu = torch.empty(num_rows, outer, dtype=x.dtype, device=x.device)
    derivative = torch.empty_like(gelu)
    arguments: list[object] = [x, w, bias, gelu, derivative]
    if config.tma:
        store_block = [config.block_n, config.block_f // (2 if config.halves else 1)]
        arguments = [
            TensorDescriptor.from_tensor(x, [config.block_n, config.block_k]),
            TensorDescriptor.from_tensor(w, [config.block_f, config.block_k]),
            bias,
            TensorDescriptor.from_tensor(gelu, store_block),
            TensorDescriptor.from_tensor(derivative, store_block),
        ]
    forward_kernel[_grid(num_rows, outer, config, x.device)](
        *arguments,
        num_rows,
        K=inner,
        F=outer,
        BLOCK_N=config.block_n,
        BLOCK_F=config.block_f,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        TMA=config.tma,
        HALVES=config.halves,
        PERSISTENT=config.programs_per_multiprocessor > 0,
        EXACT=x.dtype == torch.float32,
        HARDWARE=x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return gelu, derivative


def linear_gelu_backward(
    dy: torch.Tensor, w: torch.Tensor, gprime: torch.Tensor, *, config: GemmConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dy @ w) * gprime and its column sums: dy [N, K], w [K, F], gprime [N, F] -> ([N, F] in dy's dtype,
    fp32 [F]).

    `w` is fc2's weight as nn.Linear holds it, gprime the second result of `linear_gelu_forward`; the column
    sums are the gradient of fc1's bias, bitwise the same in every run. Raises ValueError for shapes that do
    not fit, tensors that are not contiguous, or operands of different dtypes.
    """
    if dy.dim() != 2 or dy.shape[0] == 0:
        raise ValueError(f"dy must be a matrix with at least one row, got shape {tuple(dy.shape)}")
    num_rows, inner = dy.shape
    outer = w.shape[1]
    require_shape("w", w, (inner, outer))
    require_shape("gprime", gprime, (num_rows, outer))
    require_contiguous(dy=dy, w=w, gprime=gprime)
    if not dy.dtype == w.dtype == gprime.dtype:
        raise ValueError(f"dy is {dy.dtype}, w {w.dtype}, gprime {gprime.dtype}: they must be of one dtype")
    config = config or gemm_config(inner, outer, dy.dtype, dy.device, backward=True)
    _check_tma(config, inner, outer, dy)
    dh = torch.empty(num_rows, outer, dtype=dy.dtype, device=dy.device)
    row_tiles = ceil_div(num_rows, config.block_n)
    partials = new_partials(row_tiles, outer, device=dy.device)
    factor_tma = config.tma and not config.early_factor
    arguments: list[object] = [dy, w, gprime, dh]
    if config.tma:
        halves = config.halves and not config.early_factor
        store_block = [config.block_n, config.block_f // (2 if halves else 1)]
        arguments = [
            TensorDescriptor.from_tensor(dy, [config.block_n, config.block_k]),
            TensorDescriptor.from_tensor(w, [config.block_k, config.block_f]),
            TensorDescriptor.from_tensor(gprime, store_block) if factor_tma else gprime,
            TensorDescriptor.from_tensor(dh, store_block),
        ]
    backward_kernel[_grid(num_rows, outer, config, dy.device)](
        *arguments,
        partials,
        num_rows,
        K=inner,
        F=outer,
        BLOCK_N=config.block_n,
        BLOCK_F=config.block_f,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        TMA=config.tma,
        HALVES=config.halves,
        PERSISTENT=config.programs_per_multiprocessor > 0,
        EARLY=config.early_factor,
        FACTOR_TMA=factor_tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return dh, sum_partials(partials)
