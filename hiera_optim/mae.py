"""The masked autoencoder in window-major Z-order, in plain PyTorch: decoder, labels, loss, FAIR's contract.

Equal to FAIR's MaskedAutoencoderHiera with static shapes only. Exactly what the loss needs is computed: the
last decoder block's queries and MLP, the decoder norm and the prediction run for masked tokens only. Labels
and loss are float32 (float64 for float64 input), whatever the model computes in. Shape letters: geometry.py.

Labels are the normalised samples of each masked prediction patch. 2-D: (C, y, x) order; 3-D: the first frame
of each token, (y, x, C) order; both as FAIR. 1-D, where FAIR defines no loss: (s, C) order, normalised by the
patch's own mean and unbiased variance in the same way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hiera_optim.attention import take_rows
from hiera_optim.dispatch import use_kernels
from hiera_optim.encoder import (
    batch_index,
    check_input,
    encode,
    keep_probabilities,
    run_block,
    state_of,
    unit_coordinates,
)
from hiera_optim.geometry import FairModel, Geometry, grid_to_unit, grid_to_units
from hiera_optim.masks import (
    check_keep_idx,
    check_keep_idx_form,
    check_mask,
    check_mask_form,
    mask_from_keep,
    on_host_path,
    split_mask,
)


def assemble_decoder(model: FairModel, geom: Geometry, latent: Tensor, keep_idx: Tensor) -> Tensor:
    """Decoder input: embedded latent at kept mask units, mask token elsewhere, plus position.

    latent [B, L, S, C], keep_idx int64 [B, L]; returns [B, M * S, D], units in order, S tokens in Z-order.
    """
    tokens = model.decoder_embed(latent)
    B, L, S, D = tokens.shape
    M = geom.num_mask_units
    # FAIR adds mask token and latent, so under autocast the sum has the wider dtype.
    dtype = torch.promote_types(tokens.dtype, model.mask_token.dtype)
    empty = model.mask_token.to(dtype).view(1, 1, 1, D).expand(B, M, S, D).reshape(B, M, S * D)
    index = keep_idx.unsqueeze(-1).expand(B, L, S * D)
    full: Tensor = empty.scatter(1, index, tokens.to(dtype).reshape(B, L, S * D))
    position = model.decoder_pos_embed.view(*geom.pred_shape, D)
    position = grid_to_units(position, 0, geom.mask_units_shape, geom.q_stride, geom.final_levels)
    return full.reshape(B, M * S, D).add(position.reshape(M * S, D))


def unit_rows(units: Tensor, tokens: int) -> Tensor:
    """int64 [B, R] mask units to [B, R * tokens] rows of a window-major sequence."""
    rows = units.unsqueeze(-1) * tokens + torch.arange(tokens, device=units.device)
    return rows.flatten(1)


def run_decoder(model: FairModel, x: Tensor, rows: Tensor | None) -> Tensor:
    """Decoder blocks on x [B, N, D]; the last one only for `rows` int64 [B, R] if given: [B, R, D]."""
    blocks, backends = model.decoder_blocks, state_of(model).decoder_backends
    recompute = bool(model.training and getattr(model, "_hiera_checkpoint_decoder", False))
    x = x.unsqueeze(1)
    last = len(blocks) - 1
    for i, block in enumerate(blocks):
        x = run_block(block, x, backends[i], rows if i == last else None, recompute)
    x = x.squeeze(1)
    return take_rows(x, rows) if rows is not None and last < 0 else x


def decode(model: FairModel, geom: Geometry, latent: Tensor, keep_idx: Tensor, drop_idx: Tensor) -> Tensor:
    """Predictions of the masked mask units: [B, M - L, S, F], S in Z-order."""
    S = geom.tokens_per_unit_final
    x = assemble_decoder(model, geom, latent, keep_idx)
    x = run_decoder(model, x, unit_rows(drop_idx, S))
    pred: Tensor = model.decoder_pred(model.decoder_norm(x))
    return torch.unflatten(pred, 1, (drop_idx.shape[1], S))


def normalise(patches: Tensor) -> Tensor:
    """Each patch [..., F] less its mean, over its standard deviation (unbiased, variance + 1e-6)."""
    mean = patches.mean(dim=-1, keepdim=True)
    var = patches.var(dim=-1, keepdim=True)
    return (patches - mean) / (var + 1.0e-6) ** 0.5


def masked_label(x: Tensor, drop_idx: Tensor, geom: Geometry) -> Tensor:
    """Normalised labels of the masked mask units: [B, M - L, S, F], float32 (float64 for float64 input).

    x [B, in_chans, *input_size] in the precision it came in; drop_idx int64 [B, M - L].
    """
    dims, p = geom.spatial_dims, geom.pred_stride
    if dims == 3:
        x = x[:, :, :: geom.frame_stride]
    # Per dimension: mask units, tokens of the unit, pixels of the patch (none along time).
    split: list[int] = []
    for d, (count, tokens) in enumerate(zip(geom.mask_units_shape, geom.final_unit_shape, strict=True)):
        split += [count, tokens, 1 if dims == 3 and d == 0 else p]
    x = x.reshape(x.shape[0], geom.in_chans, *split)
    units, tokens_at, pixels = ([2 + 3 * d + i for d in range(dims)] for i in range(3))
    patch = [1, *pixels] if dims == 2 else [*pixels, 1]
    x = x.permute(0, *units, *tokens_at, *patch)[(batch_index(x), *unit_coordinates(drop_idx, geom))]
    x = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(2 + dims)
    return normalise(grid_to_unit(x, 2, geom.q_stride, geom.final_levels))


def mae_loss(pred: Tensor, label: Tensor) -> Tensor:
    """Mean squared error in the label's dtype; the order of the tokens does not matter."""
    return ((pred.to(label.dtype) - label) ** 2).mean()


def fair_positions(geom: Geometry, units: Tensor) -> Tensor:
    """Row-major spatial position of each prediction token of the mask units [B, R]: int64 [B, R * S]."""
    N = math.prod(geom.pred_shape)
    grid = torch.arange(N, device=units.device).view(geom.pred_shape)
    table = grid_to_units(grid, 0, geom.mask_units_shape, geom.q_stride, geom.final_levels)
    return table[units].flatten(1)


def to_fair(tokens: Tensor, order: Tensor) -> Tensor:
    """[B, M - L, S, F] to FAIR's [B * masked tokens, F], with `order` = argsort of `fair_positions`."""
    return take_rows(tokens.flatten(1, 2), order).flatten(0, 1)


def resolve_masks(
    model: FairModel,
    geom: Geometry,
    x: Tensor,
    mask_ratio: float,
    mask: Tensor | None,
    keep_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mask [B, M], keep_idx [B, L], drop_idx [B, M - L]) from what the caller gave.

    keep_idx alone or with its mask: only shapes and dtypes are checked on CUDA, values too on the CPU. mask
    alone: its rows are counted on the host; inside a compiled or captured region, where that is impossible, L
    comes from mask_ratio and a device-side assertion holds the mask to it. Neither: one draw of
    model.get_random_mask. Raises TypeError or ValueError for wrong use.
    """
    B, M = x.shape[0], geom.num_mask_units
    host = on_host_path()
    if keep_idx is not None:
        check_keep_idx_form(keep_idx, B, M)
        if mask is not None:
            check_mask_form(mask, B, M)
        if host and keep_idx.device.type == "cpu":
            check_keep_idx(keep_idx, mask, M)
        own = mask_from_keep(keep_idx, M)
        return own, keep_idx, split_mask(own, keep_idx.shape[1])[1]
    counted = mask is not None or not state_of(model).own_random_mask
    if mask is None:
        kept = geom.num_kept(mask_ratio)
        mask = model.get_random_mask(x, mask_ratio)
    if counted and host:
        kept = check_mask(mask, B, M)
    elif counted:
        check_mask_form(mask, B, M)
        kept = geom.num_kept(mask_ratio)
        torch._assert_async(
            (mask.sum(dim=1) == kept).all(),
            f"a compiled step given a mask without keep_idx needs mask_ratio's count: {kept} of {M} units",
        )
    return (mask, *split_mask(mask, kept))


def predict(
    model: FairModel,
    geom: Geometry,
    x: Tensor,
    mask: Tensor,
    keep_idx: Tensor,
    drop_idx: Tensor,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(pred in the model's dtype, label in float32), both [B, M - L, S, F] of the masked mask units.

    scales: fp32 [2 * encoder blocks, B] factors of stochastic depth, see `encoder.drop_path_scales`; None to draw them.
    """
    pred = decode(model, geom, encode(model, geom, x, mask, keep_idx, scales), keep_idx, drop_idx)
    return pred, masked_label(x, drop_idx, geom)


def masked_loss(
    model: FairModel,
    geom: Geometry,
    x: Tensor,
    mask: Tensor,
    keep_idx: Tensor,
    drop_idx: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """The MAE loss alone, 0-d float32: what a training step needs. Nothing is checked or reordered.

    The arguments are `predict`'s.
    """
    return mae_loss(*predict(model, geom, x, mask, keep_idx, drop_idx, scales))


def fused_loss(
    model: FairModel, geom: Geometry, x: Tensor, mask: Tensor, keep_idx: Tensor, drop_idx: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss 0-d float32, pred [B, M - L, S, F]) through the fused kernels."""
    from hiera_optim import fast  # loads Triton, which not every machine has
    from hiera_optim.ops.library import stochastic_depth

    scales = None
    if model.training and any(getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks):
        scales = stochastic_depth(drop_idx, keep_probabilities(model))
    loss, pred = fast.mae_loss(model, geom, x, mask, keep_idx, drop_idx, scales)
    return loss, pred.view(*drop_idx.shape, geom.tokens_per_unit_final, -1)


def mae_forward(
    model: FairModel,
    x: Tensor,
    mask_ratio: float = 0.6,
    mask: Tensor | None = None,
    keep_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FAIR's MaskedAutoencoderHiera.forward: (loss, pred, label, mask).

    x [B, in_chans, *input_size], floating point; mask bool [B, M], True = keep; keep_idx int64 [B, L].
    loss 0-d and label [B * masked tokens, F] are float32 or wider, pred [B * masked tokens, F] has the
    model's dtype; tokens are in FAIR's order, row-major in space. Raises TypeError or ValueError, one line,
    for wrong shapes, dtypes, masks or ratios.
    """
    geom = state_of(model).geom
    check_input(geom, x)
    given = mask
    mask, keep_idx, drop_idx = resolve_masks(model, geom, x, mask_ratio, mask, keep_idx)
    if drop_idx.shape[1] == 0:
        raise ValueError(f"the mask keeps all {geom.num_mask_units} mask units: nothing to predict")
    if use_kernels(model, geom, x.device) and not x.requires_grad:
        loss, pred = fused_loss(model, geom, x, mask, keep_idx, drop_idx)
        label = masked_label(x, drop_idx, geom)
    else:
        pred, label = predict(model, geom, x, mask, keep_idx, drop_idx)
        loss = mae_loss(pred, label)
    order = fair_positions(geom, drop_idx).argsort(dim=1)
    returned = mask if given is None else given
    return loss, to_fair(pred, order), to_fair(label, order), returned
