"""Static address tables for the kernels, built once a geometry and device.

1-D and 2-D inputs are treated as 3-D ones with leading dimensions of size 1, so that one kernel serves all.

Operators take a geometry as a list of integers (`encode`), which any compiled graph can hold, and look their tables up
when they run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hiera_optim.encoder import branch_probabilities
from hiera_optim.geometry import Geometry, grid_to_units
from hiera_optim.ops._launch import outside_graph_pools
from hiera_optim.ops.mae_loss import LabelTables
from hiera_optim.ops.patch_embed import PatchTables


@dataclass(frozen=True)
class Addressing:
    """What of a `Geometry` decides addresses."""

    in_chans: int
    levels: int
    q_pool: int
    pred_stride: int
    input_size: tuple[int, ...]
    patch_kernel: tuple[int, ...]
    patch_stride: tuple[int, ...]
    patch_padding: tuple[int, ...]
    mask_unit_size: tuple[int, ...]
    mask_units_shape: tuple[int, ...]
    q_stride: tuple[int, ...]

    @property
    def spatial_dims(self) -> int:
        return len(self.input_size)

    @property
    def field(self) -> int:
        """K, values in a receptive field."""
        return self.in_chans * math.prod(self.patch_kernel)

    @property
    def tokens(self) -> int:
        """T, tokens in a mask unit."""
        return math.prod(self.mask_unit_size)


def encode(g: Geometry) -> list[int]:
    """A geometry's addressing as integers."""
    sizes = (g.input_size, g.patch_kernel, g.patch_stride, g.patch_padding, g.mask_unit_size, g.mask_units_shape)
    code = [g.in_chans, g.levels, g.q_pool, g.pred_stride]
    for size in (*sizes, g.q_stride):
        code += size
    return code


@functools.lru_cache(maxsize=64)
def decode(code: tuple[int, ...]) -> Addressing:
    """Inverse of `encode`."""
    sizes, dims = code[4:], (len(code) - 4) // 7
    return Addressing(*code[:4], *(sizes[i : i + dims] for i in range(0, 7 * dims, dims)))  # type: ignore[arg-type]


def _pad(values: Sequence[int]) -> tuple[int, int, int]:
    a, b, c = (1,) * (3 - len(values)) + tuple(values)
    return a, b, c


def _grid(shape: Sequence[int]) -> Tensor:
    """[*shape, len(shape)] int64 coordinates."""
    return torch.stack(torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij"), -1)


def _strides(size: Sequence[int]) -> Tensor:
    """Row-major strides of a grid, in elements."""
    return torch.tensor([math.prod(size[d + 1 :]) for d in range(len(size))])


def _table(offset: Tensor, coordinates: Tensor, device: torch.device) -> Tensor:
    """[n, 4] int32: offset and up to three coordinates, the leading ones 0."""
    table = torch.zeros(len(offset), 4, dtype=torch.int32)
    table[:, 0] = offset
    table[:, 4 - coordinates.shape[1] :] = coordinates
    return table.to(device)


def _patch_tables(code: tuple[int, ...], device: torch.device) -> PatchTables:
    g = decode(code)
    ones = (1,) * g.spatial_dims
    strides, stride = _strides(g.input_size), torch.tensor(g.patch_stride)
    tokens = grid_to_units(_grid(g.mask_unit_size), 0, ones, g.q_stride, g.levels)[0] * stride
    field = (_grid(g.patch_kernel).view(-1, g.spatial_dims) - torch.tensor(g.patch_padding)).repeat(g.in_chans, 1)
    channel = torch.arange(g.in_chans).repeat_interleave(math.prod(g.patch_kernel)) * math.prod(g.input_size)
    pixels = torch.tensor(g.mask_unit_size) * stride
    corner = _grid(g.mask_units_shape).view(-1, g.spatial_dims) * pixels
    return PatchTables(
        rows=_table((tokens * strides).sum(-1), tokens, device),
        cols=_table(channel + (field * strides).sum(-1), field, device),
        origins=(corner * strides).sum(-1).int().to(device),
        unit=_pad(pixels.tolist()),
        units=_pad(g.mask_units_shape),
    )


def _label_tables(code: tuple[int, ...], device: torch.device) -> LabelTables:
    g, dims = decode(code), decode(code).spatial_dims
    strides = _strides(g.input_size)
    step = torch.tensor([p * q**g.q_pool for p, q in zip(g.patch_stride, g.q_stride, strict=True)])
    final = [u // q**g.q_pool for u, q in zip(g.mask_unit_size, g.q_stride, strict=True)]
    tokens = _grid([m * f for m, f in zip(g.mask_units_shape, final, strict=True)])
    corner = (tokens * (step * strides)).sum(-1)
    origin = grid_to_units(corner, 0, g.mask_units_shape, g.q_stride, g.levels - g.q_pool).flatten()
    patch = (g.pred_stride,) * min(2, dims)
    within = (_grid(patch) * strides[-len(patch) :]).sum(-1).flatten()
    channel = torch.arange(g.in_chans) * math.prod(g.input_size)
    offsets = channel[:, None] + within if dims == 2 else within[:, None] + channel
    return LabelTables(origin.int().to(device), offsets.flatten().int().to(device))


# Never dropped: a recorded graph reads its tables for as long as it lives.
@functools.cache
def patch_tables(code: tuple[int, ...], device: torch.device) -> PatchTables:
    """Addresses for `gather_patches`."""
    return outside_graph_pools(lambda: _patch_tables(code, device), device)


@functools.cache
def label_tables(code: tuple[int, ...], device: torch.device) -> LabelTables:
    """Addresses of the label patches.

    The order of a patch's values is FAIR's: (C, h, w) in 2-D, (h, w, C) of the token's first frame in 3-D; in 1-D it is
    (s, C).
    """
    return outside_graph_pools(lambda: _label_tables(code, device), device)


@functools.cache
def keep_probabilities(keep: tuple[float, ...], device: torch.device) -> Tensor:
    """`encoder.branch_probabilities`, made once."""
    return outside_graph_pools(lambda: branch_probabilities(keep, device), device)
