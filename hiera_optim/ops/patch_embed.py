"""Patch embedding of the kept mask units only: gathers their receptive fields into a matrix for one GEMM.

FAIR's model convolves the whole image and throws the dropped mask units away. Here each token of a kept unit gets one
row of `K = C * prod(patch_kernel)` input values, pixels of dropped units and of the padding zeroed, so that the
convolution is `rows @ weight.flatten(1).T` on 1 - mask_ratio of the tokens.

Legend: B batch, C channels, M mask units in a sample, L kept units, T tokens in a mask unit, K values in a
receptive field (padded to a multiple of 8 for the GEMM's alignment).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 32
BLOCK_COLS = 64


@dataclass(frozen=True)
class PatchTables:
    """Static addresses of a geometry, on one device; 1-D and 2-D inputs have leading dimensions of size 1."""

    rows: Tensor
    """[T, 4] int32: each token of a mask unit, in Z-order: offset of its first pixel in one channel of the input,
    relative to the unit's, and the pixel's coordinates in the unit."""
    cols: Tensor
    """[K, 4] int32: each value of the receptive field: its offset in a sample and its coordinates, relative to the
    token's first pixel, padding subtracted."""
    origins: Tensor
    """[M] int32: offset of each unit's first pixel in one channel of the input."""
    unit: tuple[int, int, int]
    """Size of a mask unit in pixels."""
    units: tuple[int, int, int]
    """Mask units along each dimension."""


@triton.jit
def _side(position, SIZE: tl.constexpr):
    """0 before the unit, 1 in it, 2 behind it."""
    return tl.where(position < 0, 0, tl.where(position < SIZE, 1, 2))


@triton.jit
def _gather_patches_kernel(
    x_ptr, keep_ptr, mask_ptr, rows_ptr, cols_ptr, origins_ptr, out_ptr,
    sample_stride, L, T, K, KP,
    UZ: tl.constexpr, UY: tl.constexpr, UX: tl.constexpr,
    MZ: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(T, BR)
    pid = tl.program_id(0)
    unit_row = pid // row_blocks  # b * L + l
    b = (unit_row // L).to(tl.int64)
    unit = tl.load(keep_ptr + unit_row).to(tl.int32)
    # One bit a neighbour of the unit, itself included: is it there, and kept? A receptive field reaches no further.
    uz, uy, ux = unit // (MY * MX), unit // MX % MY, unit % MX
    kept = 0
    for j in tl.static_range(0, 27):
        if (MZ > 1) | ((j >= 9) & (j < 18)):
            z, y, w = uz + (j // 9 - 1), uy + (j // 3 % 3 - 1), ux + (j % 3 - 1)
            there = (z >= 0) & (z < MZ) & (y >= 0) & (y < MY) & (w >= 0) & (w < MX)
            bit = tl.load(mask_ptr + b * (MZ * MY * MX) + (z * MY + y) * MX + w, mask=there, other=0)
            kept |= (bit != 0).to(tl.int32) << j

    t = (pid % row_blocks) * BR + tl.arange(0, BR)
    rows_ok = t < T
    row = rows_ptr + t * 4
    first = x_ptr + b * sample_stride + tl.load(origins_ptr + unit) + tl.load(row, mask=rows_ok, other=0)
    z = tl.load(row + 1, mask=rows_ok, other=0)
    y = tl.load(row + 2, mask=rows_ok, other=0)
    w = tl.load(row + 3, mask=rows_ok, other=0)
    out = out_ptr + (unit_row.to(tl.int64) * T + t) * KP
    for start in range(0, KP, BK):
        k = start + tl.arange(0, BK)
        cols_ok = k < K
        col = cols_ptr + k * 4
        # Tiles are [values, rows]: where addresses show no pattern, Triton lays a warp along the first dimension, and
        # along a row of the receptive field seven pixels are neighbours (209 us the other way round).
        neighbour = 3 * _side(y[None, :] + tl.load(col + 2, mask=cols_ok, other=0)[:, None], UY)
        neighbour += _side(w[None, :] + tl.load(col + 3, mask=cols_ok, other=0)[:, None], UX)
        if MZ > 1:
            neighbour += 9 * _side(z[None, :] + tl.load(col + 1, mask=cols_ok, other=0)[:, None], UZ)
        else:
            neighbour += 9
        ok = rows_ok[None, :] & cols_ok[:, None] & (((kept >> neighbour) & 1) != 0)
        value = tl.load(first[None, :] + tl.load(col, mask=cols_ok, other=0)[:, None], mask=ok, other=0.0)
        value = value.to(out_ptr.dtype.element_ty)
        tl.store(out[None, :] + k[:, None], value, mask=rows_ok[None, :] & (k < KP)[:, None])


def padded_columns(k: int) -> int:
    """K rounded up to the 16 bytes of bf16 that tensor-core GEMMs want rows aligned to."""
    return (k + 7) // 8 * 8


def gather_patches(x: Tensor, mask: Tensor, keep_idx: Tensor, tables: PatchTables, dtype: torch.dtype) -> Tensor:
    """Receptive fields of the kept tokens.

    Args:
        x: [B, C, *input_size], any float dtype.
        mask: [B, M] bool, True = keep.
        keep_idx: [B, L] int64, the kept units.
        tables: addresses of the geometry.
        dtype: dtype of the result.

    Returns:
        [B * L * T, padded_columns(K)], tokens of a unit in Z-order, columns in the order of `weight.flatten(1)`.
    """
    x, mask, keep_idx = x.contiguous(), mask.contiguous(), keep_idx.contiguous()
    (B, L), T, K = keep_idx.shape, tables.rows.shape[0], tables.cols.shape[0]
    KP = padded_columns(K)
    out = torch.empty((B * L * T, KP), dtype=dtype, device=x.device)
    rows = min(BLOCK_ROWS, triton.next_power_of_2(T))
    _gather_patches_kernel[(B * L * triton.cdiv(T, rows),)](
        x, keep_idx, mask.view(torch.uint8), tables.rows, tables.cols, tables.origins, out,
        x[0].numel(), L, T, K, KP, *tables.unit, *tables.units, BR=rows, BK=BLOCK_COLS, num_warps=4,
    )  # fmt: skip
    return out


def gather_patches_reference(
    x: Tensor, mask: Tensor, keep_idx: Tensor, tables: PatchTables, dtype: torch.dtype
) -> Tensor:
    """The same in plain PyTorch, by advanced indexing."""
    B, K = len(x), len(tables.cols)
    (UZ, UY, UX), (MZ, MY, MX) = tables.unit, tables.units
    unit = torch.stack((keep_idx // (MY * MX), keep_idx // MX % MY, keep_idx % MX), -1)  # [B, L, 3]
    local = (tables.rows[:, None, 1:] + tables.cols[None, :, 1:]).long()  # [T, K, 3]
    owner = unit[:, :, None, None] + torch.div(local, torch.tensor((UZ, UY, UX)), rounding_mode="floor")
    inside = ((owner >= 0) & (owner < torch.tensor((MZ, MY, MX)))).all(-1)
    index = ((owner[..., 0] * MY + owner[..., 1]) * MX + owner[..., 2]).where(inside, 0)
    inside &= mask.gather(1, index.view(B, -1)).view_as(index)
    at = tables.origins[keep_idx].long()[..., None, None] + tables.rows[:, None, 0] + tables.cols[:, 0]
    value = x.reshape(B, -1).gather(1, at.where(inside, 0).view(B, -1)).view_as(at).to(dtype)
    rows = torch.where(inside, value, 0).view(-1, K)
    return torch.nn.functional.pad(rows, (0, padded_columns(K) - K))
