"""All of a step's masks from sample ids in one kernel: `masks.sample_mask` and what the fused path needs besides.

The plain path takes some seventy small kernels (hashing on int64, two sorts), which a captured step pays in launch
gaps. Here a program ranks the hashes of one sample's mask units by counting; the results are the same to the bit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiera_optim.masks import hash_salt
from hiera_optim.ops._launch import require_contiguous

COMPARE = 32  # mask units compared with all others at a time
COMPARED = 16384  # at most so many pairs: with more, registers spill and compiling takes a minute


@triton.jit
def _mix32(h):
    """lowbias32 in uint32, as `hiera_optim.masks._mix32` in int64."""
    h = (h ^ (h >> 16)) * tl.cast(0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.cast(0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def _kernel(
    ids_ptr, mask_ptr, keep_ptr, drop_ptr, slot_ptr, drop_slot_ptr, salt, M, L,
    BM: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    ok = m < M
    sample = tl.load(ids_ptr + b)
    salt = salt.to(tl.uint32)
    h = _mix32(sample.to(tl.uint32) ^ salt)
    h = _mix32(h + (sample >> 32).to(tl.uint32) * tl.cast(0x3C6EF372, tl.uint32))
    noise = _mix32(h ^ _mix32(m.to(tl.uint32) + salt))
    rank = tl.zeros([BM], tl.int32)
    for first in range(0, M, BJ):
        j = first + tl.arange(0, BJ)
        other = _mix32(h ^ _mix32(j.to(tl.uint32) + salt))
        before = (other[None, :] < noise[:, None]) | ((other[None, :] == noise[:, None]) & (j[None, :] < m[:, None]))
        rank += tl.sum((before & (j < M)[None, :]).to(tl.int32), 1)
    kept = ok & (rank < L)
    ahead = tl.cumsum(kept.to(tl.int32), 0)  # kept units up to and with this one
    tl.store(mask_ptr + b * M + m, kept.to(tl.uint8), mask=ok)
    tl.store(keep_ptr + b * L + ahead - 1, m.to(tl.int64), mask=kept)
    tl.store(drop_ptr + b * (M - L) + m - ahead, m.to(tl.int64), mask=ok & (rank >= L))
    tl.store(slot_ptr + b * M + m, tl.where(kept, ahead - 1, -1), mask=ok)
    tl.store(drop_slot_ptr + b * M + m, tl.where(kept, -1, m - ahead), mask=ok)


def sample_masks(
    sample_ids: Tensor, num_mask_units: int, num_kept: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Masks as a pure function of (seed, sample id), with their inverses.

    Args:
        sample_ids: [B] int64.
        num_mask_units, num_kept: M and L.
        seed: any int.

    Returns:
        mask [B, M] bool, keep_idx [B, L] int64, drop_idx [B, M - L] int64 (both ascending), and the place of each
        mask unit in keep_idx and in drop_idx, or -1 ([B, M] int32 each).
    """
    require_contiguous(sample_ids=sample_ids)
    B, M, L, device = len(sample_ids), num_mask_units, num_kept, sample_ids.device
    mask = torch.empty((B, M), dtype=torch.bool, device=device)
    keep = torch.empty((B, L), dtype=torch.int64, device=device)
    drop = torch.empty((B, M - L), dtype=torch.int64, device=device)
    slot, drop_slot = (torch.empty((B, M), dtype=torch.int32, device=device) for _ in range(2))
    block = triton.next_power_of_2(M)
    _kernel[(B,)](
        sample_ids, mask.view(torch.uint8), keep, drop, slot, drop_slot, hash_salt(seed), M, L,
        BM=block, BJ=min(COMPARE, max(1, COMPARED // block)), num_warps=4 if block <= 1024 else 8,
    )  # fmt: skip
    return mask, keep, drop, slot, drop_slot
