"""Static address tables of a geometry for the kernels, built once a device.

1-D and 2-D inputs are treated as 3-D ones with leading dimensions of size 1, so that one kernel serves all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hiera_optim.geometry import Geometry, grid_to_units
from hiera_optim.ops.mae_loss import LabelTables
from hiera_optim.ops.patch_embed import PatchTables


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


@functools.lru_cache(maxsize=64)
def patch_tables(geometry: Geometry, device: torch.device) -> PatchTables:
    """Addresses for `gather_patches`."""
    g, ones = geometry, (1,) * geometry.spatial_dims
    strides = _strides(g.input_size)
    tokens = grid_to_units(_grid(g.mask_unit_size), 0, ones, g.q_stride, g.levels)[0] * torch.tensor(g.patch_stride)
    field = (_grid(g.patch_kernel).view(-1, g.spatial_dims) - torch.tensor(g.patch_padding)).repeat(g.in_chans, 1)
    channel = torch.arange(g.in_chans).repeat_interleave(math.prod(g.patch_kernel)) * math.prod(g.input_size)
    corner = _grid(g.mask_units_shape).view(-1, g.spatial_dims) * torch.tensor(g.unit_pixels)
    return PatchTables(
        rows=_table((tokens * strides).sum(-1), tokens, device),
        cols=_table(channel + (field * strides).sum(-1), field, device),
        origins=(corner * strides).sum(-1).int().to(device),
        unit=_pad(g.unit_pixels),
        units=_pad(g.mask_units_shape),
    )


@functools.lru_cache(maxsize=64)
def label_tables(geometry: Geometry, device: torch.device) -> LabelTables:
    """Addresses of the label patches.

    The order of a patch's values is FAIR's: (C, h, w) in 2-D, (h, w, C) of the token's first frame in 3-D; in 1-D it is
    (s, C).
    """
    g, dims = geometry, geometry.spatial_dims
    strides = _strides(g.input_size)
    step = [p * q**g.q_pool for p, q in zip(g.patch_stride, g.q_stride, strict=True)]
    corner = (_grid(g.pred_shape) * (torch.tensor(step) * strides)).sum(-1)
    origin = grid_to_units(corner, 0, g.mask_units_shape, g.q_stride, g.final_levels).flatten()
    patch = (g.pred_stride,) * min(2, dims)
    within = (_grid(patch) * strides[-len(patch) :]).sum(-1).flatten()
    channel = torch.arange(g.in_chans) * math.prod(g.input_size)
    offsets = channel[:, None] + within if dims == 2 else within[:, None] + channel
    return LabelTables(origin.int().to(device), offsets.flatten().int().to(device))
