"""Patch embedding of the kept mask units only: gathers their receptive fields into a matrix for one GEMM.

FAIR's model convolves the whole image and throws the dropped mask units away. Here each token of a kept unit gets one
row of `K = C * prod(patch_kernel)` input values, pixels of dropped units and of the padding zeroed, so that the
convolution is `rows @ weight.flatten(1).T` on 1 - mask_ratio of the tokens.

Legend: B batch, C channels, M mask units in a sample, L kept units, T tokens in a mask unit, K values in a
receptive field (padded to a multiple of 8 for the GEMM's alignment).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# 16 rows of 64 values: a row's runs of patch_kernel[-1] pixels stay in L1 while its neighbours read them again
BLOCK_ROWS = 16
BLOCK_COLS = 64


@dataclass(frozen=True)
class PatchTables:
    """Static addresses of a geometry, on one device; 1-D and 2-D inputs have leading dimensions of size 1."""

    rows: Tensor
    """[T, 3] int32: first pixel of each token of a mask unit, relative to the unit, in Z-order."""
    cols: Tensor
    """[K, 4] int32: channel and pixel offset of each value of the receptive field, padding subtracted."""
    size: tuple[int, int, int]
    """Input size in pixels."""
    unit: tuple[int, int, int]
    """Size of a mask unit in pixels."""
    units: tuple[int, int, int]
    """Mask units along each dimension."""


@triton.jit
def _gather_patches_kernel(
    x_ptr, keep_ptr, mask_ptr, rows_ptr, cols_ptr, out_ptr,
    L, M, T, K, KP, C,
    SZ: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    UZ: tl.constexpr, UY: tl.constexpr, UX: tl.constexpr,
    MY: tl.constexpr, MX: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(T, BR)
    pid = tl.program_id(0)
    unit_row = pid // row_blocks  # b * L + l
    b = (unit_row // L).to(tl.int64)
    t = (pid % row_blocks) * BR + tl.arange(0, BR)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    unit = tl.load(keep_ptr + unit_row).to(tl.int32)
    rows_ok = t < T
    cols_ok = k < K
    tz = tl.load(rows_ptr + t * 3, mask=rows_ok, other=0) + (unit // (MY * MX)) * UZ
    ty = tl.load(rows_ptr + t * 3 + 1, mask=rows_ok, other=0) + (unit // MX % MY) * UY
    tx = tl.load(rows_ptr + t * 3 + 2, mask=rows_ok, other=0) + (unit % MX) * UX
    c = tl.load(cols_ptr + k * 4, mask=cols_ok, other=0)
    pz = tz[:, None] + tl.load(cols_ptr + k * 4 + 1, mask=cols_ok, other=0)[None, :]
    py = ty[:, None] + tl.load(cols_ptr + k * 4 + 2, mask=cols_ok, other=0)[None, :]
    px = tx[:, None] + tl.load(cols_ptr + k * 4 + 3, mask=cols_ok, other=0)[None, :]
    ok = rows_ok[:, None] & cols_ok[None, :]
    ok &= (pz >= 0) & (pz < SZ) & (py >= 0) & (py < SY) & (px >= 0) & (px < SX)
    owner = (pz // UZ * MY + py // UY) * MX + px // UX
    ok &= tl.load(mask_ptr + b * M + owner, mask=ok, other=0) != 0
    at = b * (C * SZ * SY * SX) + ((c[None, :] * SZ + pz) * SY + py) * SX + px
    value = tl.load(x_ptr + at, mask=ok, other=0.0)
    out = unit_row.to(tl.int64) * T * KP + t[:, None] * KP + k[None, :]
    tl.store(out_ptr + out, value.to(out_ptr.dtype.element_ty), mask=rows_ok[:, None] & (k < KP)[None, :])


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
    (B, L), M, T, K = keep_idx.shape, mask.shape[1], tables.rows.shape[0], tables.cols.shape[0]
    KP = padded_columns(K)
    out = torch.empty((B * L * T, KP), dtype=dtype, device=x.device)
    grid = (B * L * triton.cdiv(T, BLOCK_ROWS), triton.cdiv(KP, BLOCK_COLS))
    _gather_patches_kernel[grid](
        x, keep_idx, mask.view(torch.uint8), tables.rows, tables.cols, out,
        L, M, T, K, KP, x.shape[1], *tables.size, *tables.unit, *tables.units[1:],
        BR=BLOCK_ROWS, BK=BLOCK_COLS, num_warps=4,
    )  # fmt: skip
    return out


def gather_patches_reference(
    x: Tensor, mask: Tensor, keep_idx: Tensor, tables: PatchTables, dtype: torch.dtype
) -> Tensor:
    """The same in plain PyTorch, by advanced indexing."""
    B, C = x.shape[:2]
    (SZ, SY, SX), (UZ, UY, UX), (_, MY, MX) = tables.size, tables.unit, tables.units
    K = tables.cols.shape[0]
    origin = torch.stack((keep_idx // (MY * MX) * UZ, keep_idx // MX % MY * UY, keep_idx % MX * UX), -1)
    pixel = origin[:, :, None, None] + (tables.rows[:, None] + tables.cols[None, :, 1:]).long()  # [B, L, T, K, 3]
    z, y, w = pixel.unbind(-1)
    inside = (z >= 0) & (z < SZ) & (y >= 0) & (y < SY) & (w >= 0) & (w < SX)
    owner = ((z // UZ * MY + y // UY) * MX + w // UX).where(inside, 0)
    inside &= mask.gather(1, owner.view(B, -1)).view_as(owner)
    at = ((tables.cols[:, 0].long() * SZ + z) * SY + y) * SX + w
    value = x.reshape(B, -1).gather(1, at.where(inside, 0).view(B, -1)).view_as(at).to(dtype)
    rows = torch.where(inside, value, 0).view(-1, K)
    return torch.nn.functional.pad(rows, (0, padded_columns(K) - K))
