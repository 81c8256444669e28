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


def _pad(values: Sequence[int], fill: int) -> tuple[int, int, int]:
    a, b, c = (fill,) * (3 - len(values)) + tuple(values)
    return a, b, c


def _grid(shape: Sequence[int]) -> Tensor:
    """[*shape, len(shape)] int64 coordinates."""
    return torch.stack(torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij"), -1)


@functools.lru_cache(maxsize=64)
def patch_tables(geometry: Geometry, device: torch.device) -> PatchTables:
    """Addresses for `gather_patches`."""
    g, dims = geometry, geometry.spatial_dims
    lead = 3 - dims
    tokens = grid_to_units(_grid(g.mask_unit_size), 0, (1,) * dims, g.q_stride, g.levels)[0]
    rows = torch.zeros(g.tokens_per_mask_unit, 3, dtype=torch.int32)
    rows[:, lead:] = (tokens * torch.tensor(g.patch_stride)).int()
    window = _grid(g.patch_kernel).view(-1, dims) - torch.tensor(g.patch_padding)
    k = len(window)
    cols = torch.zeros(g.in_chans * k, 4, dtype=torch.int32)
    cols[:, 0] = torch.arange(g.in_chans, dtype=torch.int32).repeat_interleave(k)
    cols[:, 1 + lead :] = window.int().repeat(g.in_chans, 1)
    return PatchTables(
        rows.to(device), cols.to(device), _pad(g.input_size, 1), _pad(g.unit_pixels, 1), _pad(g.mask_units_shape, 1)
    )


@functools.lru_cache(maxsize=64)
def label_tables(geometry: Geometry, device: torch.device) -> LabelTables:
    """Addresses of the label patches.

    The order of a patch's values is FAIR's: (C, h, w) in 2-D, (h, w, C) of the token's first frame in 3-D; in 1-D it is
    (s, C).
    """
    g, dims = geometry, geometry.spatial_dims
    strides = [math.prod(g.input_size[d + 1 :]) for d in range(dims)]
    step = [p * q**g.q_pool for p, q in zip(g.patch_stride, g.q_stride, strict=True)]
    corner = (_grid(g.pred_shape) * torch.tensor([a * b for a, b in zip(step, strides, strict=True)])).sum(-1)
    origin = grid_to_units(corner, 0, g.mask_units_shape, g.q_stride, g.final_levels).flatten()
    patch = (g.pred_stride,) * min(2, dims)
    within = (_grid(patch) * torch.tensor(strides[-len(patch) :])).sum(-1).flatten()
    channel = torch.arange(g.in_chans) * math.prod(g.input_size)
    offsets = channel[:, None] + within if dims == 2 else within[:, None] + channel
    return LabelTables(origin.int().to(device), offsets.flatten().int().to(device))
