"""Moves whole mask units between the kept, the dropped and the full sequence.

In window-major order a mask unit's tokens are one contiguous row of E = tokens x channels values, so what FAIR does
with boolean indexing is here a copy of rows, with the position embedding added on the way and its gradient summed
over the batch in a fixed order.

Legend: B batch, M mask units, L kept, D dropped, E values in a mask unit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiera_optim.ops._launch import require_contiguous

BLOCK = 1024
BATCH_SPLITS = 16  # partial sums over the batch: enough programs to fill 132 multiprocessors with 49 mask units


@triton.jit
def _add_pos_kernel(x_ptr, pos_ptr, index_ptr, out_ptr, E, BE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    ok = e < E
    unit = tl.load(index_ptr + row)
    x = tl.load(x_ptr + row * E + e, mask=ok, other=0.0).to(tl.float32)
    pos = tl.load(pos_ptr + unit * E + e, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + e, (x + pos).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _pos_grad_kernel(
    grad_ptr, slot_ptr, latent_ptr, pos_ptr, token_ptr, B, M, L, E, per_split,
    FULL: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """FULL: grad is [B, M, E]; writes the kept rows to latent [B, L, E] and sums dropped rows for the mask token.
    Otherwise grad is [B, L, E], read through slot."""
    m = tl.program_id(0)
    split = tl.program_id(2)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    ok = e < E
    pos = tl.zeros([BE], tl.float32)
    token = tl.zeros([BE], tl.float32)
    for i in range(per_split):
        b = split * per_split + i
        slot = tl.load(slot_ptr + b.to(tl.int64) * M + m, mask=b < B, other=-1)
        kept_at = (b.to(tl.int64) * L + slot) * E + e
        kept = ok & (slot >= 0)
        if FULL:
            g = tl.load(grad_ptr + (b.to(tl.int64) * M + m) * E + e, mask=ok & (b < B), other=0.0)
            tl.store(latent_ptr + kept_at, g, mask=kept)
            g = g.to(tl.float32)
            token += tl.where(slot >= 0, 0.0, g)
        else:
            g = tl.load(grad_ptr + kept_at, mask=kept, other=0.0).to(tl.float32)
        pos += g
    at = (split.to(tl.int64) * M + m) * E + e
    tl.store(pos_ptr + at, pos, mask=ok)
    if FULL:
        tl.store(token_ptr + at, token, mask=ok)


@triton.jit
def _assemble_kernel(latent_ptr, token_ptr, pos_ptr, slot_ptr, out_ptr, M, L, E, C, BE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # b * M + m
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    ok = e < E
    slot = tl.load(slot_ptr + row)
    kept = ok & (slot >= 0)
    value = tl.load(latent_ptr + ((row // M) * L + slot) * E + e, mask=kept, other=0.0).to(tl.float32)
    token = tl.load(token_ptr + e % C, mask=ok, other=0.0).to(tl.float32)
    pos = tl.load(pos_ptr + (row % M) * E + e, mask=ok, other=0.0).to(tl.float32)
    out = tl.where(slot >= 0, value, token) + pos
    tl.store(out_ptr + row * E + e, out.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _gather_kernel(x_ptr, index_ptr, out_ptr, M, D, E, BE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # b * D + d
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    unit = tl.load(index_ptr + row)
    value = tl.load(x_ptr + ((row // D) * M + unit) * E + e, mask=(e < E) & (unit >= 0), other=0.0)
    tl.store(out_ptr + row * E + e, value, mask=e < E)


def _block(E: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(E)))


def add_position(x: Tensor, pos: Tensor, keep_idx: Tensor) -> Tensor:
    """x [B, L, E] + pos[keep_idx], pos [M, E], keep_idx [B, L] int64; in the wider dtype of x and pos."""
    B, L, E = x.shape
    require_contiguous(x=x, pos=pos, keep_idx=keep_idx)
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, pos.dtype))
    BE = _block(E)
    _add_pos_kernel[(B * L, triton.cdiv(E, BE))](x, pos, keep_idx, out, E, BE=BE, num_warps=4)
    return out


def add_position_backward(grad: Tensor, slot: Tensor) -> Tensor:
    """Gradient of pos ([M, E] fp32) from grad [B, L, E]; slot [B, M] int32: row among the kept units, or -1."""
    return _position_gradient(grad, slot, grad.shape[1], None)[0]


def assemble(latent: Tensor, token: Tensor, pos: Tensor, slot: Tensor) -> Tensor:
    """The decoder's input: kept units' latents and mask tokens, plus positions.

    Args:
        latent: [B, L, E] with E = S * C.
        token: [C], the mask token.
        pos: [M, E] decoder position embedding.
        slot: [B, M] int32, row among the kept units, or -1.

    Returns:
        [B, M, E] in the widest of the dtypes.
    """
    B, L, E = latent.shape
    require_contiguous(latent=latent, token=token, pos=pos, slot=slot)
    M = slot.shape[1]
    dtype = torch.promote_types(torch.promote_types(latent.dtype, pos.dtype), token.dtype)
    out = torch.empty((B, M, E), dtype=dtype, device=latent.device)
    BE = _block(E)
    grid = (B * M, triton.cdiv(E, BE))
    _assemble_kernel[grid](latent, token, pos, slot, out, M, L, E, token.numel(), BE=BE, num_warps=4)
    return out


def assemble_backward(grad: Tensor, slot: Tensor, kept: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of latent ([B, kept, E], grad's dtype), token ([channels] fp32) and pos ([M, E] fp32)."""
    B, M, E = grad.shape
    latent = torch.empty((B, kept, E), dtype=grad.dtype, device=grad.device)
    pos, token = _position_gradient(grad, slot, kept, latent)
    assert token is not None
    return latent, token.view(M, -1, channels).sum((0, 1)), pos


def _position_gradient(grad: Tensor, slot: Tensor, kept: int, latent: Tensor | None) -> tuple[Tensor, Tensor | None]:
    require_contiguous(grad=grad, slot=slot)
    B, M = slot.shape
    E = grad.shape[-1]
    splits = min(BATCH_SPLITS, B)
    per_split = triton.cdiv(B, splits)
    pos = torch.empty((splits, M, E), dtype=torch.float32, device=grad.device)
    token = torch.empty_like(pos) if latent is not None else None
    BE = _block(E)
    _pos_grad_kernel[(M, triton.cdiv(E, BE), splits)](
        grad, slot, latent if latent is not None else grad, pos, token if token is not None else pos,
        B, M, kept, E, per_split, FULL=latent is not None, BE=BE, num_warps=4,
    )  # fmt: skip
    return pos.sum(0), token.sum(0) if token is not None else None


def gather_units(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, M, E] named by index [B, D] (int32 or int64): [B, D, E]; a negative index gives zeros.

    With the slots of the dropped units as index it is its own gradient: [B, D, E] back to [B, M, E].
    """
    B, M, E = x.shape
    require_contiguous(x=x, index=index)
    D = index.shape[1]
    out = torch.empty((B, D, E), dtype=x.dtype, device=x.device)
    BE = _block(E)
    _gather_kernel[(B * D, triton.cdiv(E, BE))](x, index, out, M, D, E, BE=BE, num_warps=4)
    return out


def unit_slots(index: Tensor, units: int) -> Tensor:
    """Inverse of index [B, L] into `units` mask units: [B, M] int32, the row in index, or -1."""
    B, L = index.shape
    slot = torch.full((B, units), -1, dtype=torch.int32, device=index.device)
    return slot.scatter_(1, index, torch.arange(L, dtype=torch.int32, device=index.device).expand(B, L))


def add_position_reference(x: Tensor, pos: Tensor, keep_idx: Tensor) -> Tensor:
    """`add_position` in plain PyTorch."""
    return x + pos[keep_idx]


def assemble_reference(latent: Tensor, token: Tensor, pos: Tensor, slot: Tensor) -> Tensor:
    """`assemble` in plain PyTorch."""
    E = latent.shape[-1]
    index = slot.clamp(min=0).long()[..., None].expand(-1, -1, E)
    full = torch.where(slot[..., None] >= 0, latent.gather(1, index), token.repeat(E // token.numel()))
    return full + pos


def gather_units_reference(x: Tensor, index: Tensor) -> Tensor:
    """`gather_units` in plain PyTorch."""
    rows = x.gather(1, index.clamp(min=0).long()[..., None].expand(-1, -1, x.shape[-1]))
    return torch.where(index[..., None] >= 0, rows, 0)
