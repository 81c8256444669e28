"""FAIR's masked autoencoder over the fused kernels: the same function as `hiera_optim.mae`, for CUDA.

Static shapes, no host synchronisation, and mask units as rows throughout (see `hiera_optim.geometry` for the layout).

Legend: B batch, M mask units, L kept, D dropped, T tokens in a unit, S tokens in a unit at the decoder, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiera_optim import tables
from hiera_optim.chain import BlockSpec
from hiera_optim.dispatch import compute_dtype
from hiera_optim.geometry import FairModel, Geometry, grid_to_units
from hiera_optim.ops import library as ops
from hiera_optim.ops.units import unit_slots

CHUNK = 8
"""Blocks in one operator: its weights' gradients become ready together, and their all-reduce overlaps with the next."""


def chunks(recompute: list[bool]) -> list[range]:
    """A run of blocks cut into operators: `CHUNK` blocks that keep their activations, or one that recomputes its own.

    One, since a recomputed operator holds the activations of all its blocks at once.
    """
    out = []
    start = 0
    while start < len(recompute):
        stop = start + 1
        if not recompute[start]:
            while stop < min(start + CHUNK, len(recompute)) and not recompute[stop]:
                stop += 1
        out.append(range(start, stop))
        start = stop
    return out


def block_parameters(block: FairModel, dtype: torch.dtype) -> list[Tensor]:
    """A block's parameters in the order of `hiera_optim.chain`, Linear layers in the compute dtype."""
    attn, mlp = block.attn, block.mlp
    linears = [attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias]
    hidden = [mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias]
    residual = [block.proj.weight, block.proj.bias] if block.dim != block.dim_out else []
    linears, hidden, residual = ([p.to(dtype) for p in group] for group in (linears, hidden, residual))
    return [block.norm1.weight, block.norm1.bias, *linears, block.norm2.weight, block.norm2.bias, *hidden, *residual]


def _norm(module: nn.LayerNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    return ops.norm(x, module.weight, module.bias, module.eps, dtype)


def run_blocks(
    blocks: list[FairModel], x: Tensor, batch: int, dtype: torch.dtype, *, windows: list[int],
    scales: Tensor | None = None, recompute: frozenset[int] | bool = False,
    index: Tensor | None = None, slot: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A run of blocks on [N, C] rows.

    Args:
        windows: tokens in each block's attention window before pooling; 0: all of a sample.
        scales: [2 * len(blocks), B] stochastic-depth factors, or None.
        recompute: blocks (by place in the run) whose activations are recomputed in backward.
        index, slot: the mask units that go on after the last block's attention, and their inverse.
    """
    marked = [recompute if isinstance(recompute, bool) else i in recompute for i in range(len(blocks))]
    for part in chunks(marked):
        specs, parameters = [], []
        for i in part:
            b = blocks[i]
            specs += BlockSpec(windows[i], b.attn.heads, b.attn.q_stride, b.dim != b.dim_out).to_ints()
            parameters += block_parameters(b, dtype)
        last = part.stop == len(blocks)
        x = ops.chain(
            x, parameters, specs, batch, blocks[part.start].norm1.eps,
            scales[2 * part.start : 2 * part.stop].contiguous() if scales is not None else None,
            index if last else None, slot if last else None, marked[part.start],
        )[0]  # fmt: skip
    return x


def embed(model: FairModel, g: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor, slot: Tensor) -> Tensor:
    """Patch embedding and position of the kept units: [B * L * T, C] in Z-order."""
    dtype = compute_dtype(model)
    B, L = keep_idx.shape
    proj = model.patch_embed.proj
    weight = proj.weight.flatten(1).to(dtype)
    rows = ops.gather_patches(x, mask, keep_idx, tables.encode(g), dtype)
    if rows.shape[1] > weight.shape[1]:
        weight = F.pad(weight, (0, rows.shape[1] - weight.shape[1]))
    tokens = ops.linear(rows, weight, proj.bias.to(dtype))
    pos = grid_to_units(
        model.get_pos_embed().view(*g.tokens_shape, -1), 0, g.mask_units_shape, g.q_stride, g.levels
    ).reshape(g.num_mask_units, -1)
    embedded: Tensor = ops.add_position(tokens.view(B, L, -1), pos, keep_idx, slot)
    return embedded.view(B * L * g.tokens_per_mask_unit, -1)


def _fusion_weight(head: FairModel, g: Geometry, levels: int, dtype: torch.dtype) -> Tensor:
    """A fusion head's convolution as a Linear over (group, C): [C_out, q ** levels * C_in]."""
    weight = head.weight.flatten(2).unflatten(2, head.kernel_size)  # [C_out, C_in, *kernel]
    ones = (1,) * g.spatial_dims
    ordered = grid_to_units(weight.to(dtype), 2, ones, g.q_stride, levels)[:, :, 0]
    return ordered.transpose(1, 2).flatten(1)


def encode(
    model: FairModel, g: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor, slot: Tensor,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fused multi-scale latent of the kept units, normalised: [B * L * S, C]."""
    dtype = compute_dtype(model)
    B, L = keep_idx.shape
    h = embed(model, g, x, mask, keep_idx, slot)
    blocks = list(model.blocks)
    ends = [*g.stage_ends[: g.q_pool], g.stage_ends[-1]]
    recompute: frozenset[int] = getattr(model, "_hiera_checkpoint", frozenset())
    latent: Tensor | None = None
    start = 0
    tokens = g.tokens_per_mask_unit
    for level, end in enumerate(ends):
        run = blocks[start : end + 1]
        windows = []
        for b in run:
            windows.append(tokens if b.attn.use_mask_unit_attn else 0)
            tokens //= b.attn.q_stride
        h = run_blocks(
            run, h, B, dtype, windows=windows,
            scales=scales[2 * start : 2 * end + 2] if scales is not None else None,
            recompute=frozenset(i - start for i in recompute if start <= i <= end),
        )  # fmt: skip
        levels = g.q_pool - level
        if levels > 0:
            head = model.multi_scale_fusion_heads[level]
            weight = _fusion_weight(head, g, levels, dtype)
            grouped = h.to(dtype).view(B * L * g.tokens_per_unit_final, -1)
            fused = ops.linear(grouped, weight, head.bias.to(dtype))
        else:
            fused = h
        latent = fused if latent is None else latent + fused
        start = end + 1
    assert latent is not None
    return _norm(model.encoder_norm, latent, dtype)


def decode(model: FairModel, g: Geometry, latent: Tensor, drop_idx: Tensor, slot: Tensor, drop_slot: Tensor) -> Tensor:
    """Predictions of the dropped units' tokens: [B * D * S, F], tokens of a unit in Z-order."""
    dtype = compute_dtype(model)
    B, M = slot.shape
    S = g.tokens_per_unit_final
    h = ops.linear(latent, model.decoder_embed.weight.to(dtype), model.decoder_embed.bias.to(dtype))
    width = h.shape[-1]
    pos = grid_to_units(
        model.decoder_pos_embed.view(*g.pred_shape, width), 0, g.mask_units_shape, g.q_stride, g.final_levels
    ).reshape(M, S * width)
    h = ops.assemble(h.view(B, -1, S * width), model.mask_token.flatten(), pos, slot).view(B * M * S, width)
    blocks = list(model.decoder_blocks)
    h = run_blocks(
        blocks, h, B, dtype, windows=[0] * len(blocks),
        recompute=bool(getattr(model, "_hiera_checkpoint_decoder", False)), index=drop_idx, slot=drop_slot,
    )  # fmt: skip
    h = _norm(model.decoder_norm, h, dtype)
    pred: Tensor = ops.linear(h, model.decoder_pred.weight.to(dtype), model.decoder_pred.bias.to(dtype))
    return pred


def mae_loss(
    model: FairModel, g: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor, drop_idx: Tensor,
    scales: Tensor | None = None, slots: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss and predictions of one batch.

    Args:
        x: [B, C, *input_size] float; labels are computed in fp32 from its own precision.
        mask: [B, M] bool, True = keep; keep_idx, drop_idx: [B, L] and [B, D] int64, ascending.
        scales: [2 * blocks, B] fp32 stochastic-depth factors of the encoder (1 / keep probability, or 0), or None.
        slots: inverses of keep_idx and drop_idx ([B, M] int32 each, -1 elsewhere), where the caller has them.

    Returns:
        (loss 0-d fp32, pred [B * D * S, F]): pred's tokens in unit order, Z-order inside a unit.
    """
    x = x.contiguous()
    keep_idx, drop_idx = keep_idx.contiguous(), drop_idx.contiguous()
    slot, drop_slot = slots or (unit_slots(keep_idx, g.num_mask_units), unit_slots(drop_idx, g.num_mask_units))
    latent = encode(model, g, x, mask, keep_idx, slot, scales)
    pred = decode(model, g, latent, drop_idx, slot, drop_slot)
    return ops.loss(pred, x, drop_idx, tables.encode(g)), pred
