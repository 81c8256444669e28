"""FAIR's methods one by one, each with FAIR's own contract, for subclasses and callers that use them singly.

The whole forward (mae.mae_forward) is faster: it predicts masked tokens only. These pieces are what an
optimised model offers as forward_encoder, forward_decoder and forward_loss, and what `piecewise_forward`
joins where a subclass overrides one of them. An override that calls super() reaches FAIR's own method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hiera_optim.attention import take_rows
from hiera_optim.encoder import check_input, classify, encode, latent_from_fair, latent_to_fair, state_of
from hiera_optim.geometry import FairModel, Geometry, units_to_grid
from hiera_optim.mae import assemble_decoder, mae_loss, masked_label, normalise, resolve_masks, run_decoder
from hiera_optim.masks import check_mask, mask_from_keep, on_host_path, split_mask


def hiera_forward(
    self: FairModel,
    x: Tensor | list[Tensor],
    mask: Tensor | None = None,
    return_intermediates: bool = False,
    keep_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """FAIR's Hiera.forward: scores [B, num_classes], or with a mask the last tokens [B, N, C], FAIR's order.

    return_intermediates adds the stages' outputs. Raises TypeError or ValueError for wrong inputs or masks.
    """
    geom = state_of(self).geom
    x = x[0] if isinstance(x, list) else x
    check_input(geom, x)
    if mask is not None or keep_idx is not None:
        if keep_idx is None and not on_host_path():
            raise ValueError("under torch.compile a masked classifier needs keep_idx: its length is the shape")
        mask, keep_idx, _ = resolve_masks(self, geom, x, 0.0, mask, keep_idx)
    return classify(self, geom, x, mask, keep_idx, return_intermediates)


def forward_encoder(
    self: FairModel,
    x: Tensor,
    mask_ratio: float,
    mask: Tensor | None = None,
    keep_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FAIR's forward_encoder: latent [B, L, *final_unit_shape, C] and the mask bool [B, M], True = keep."""
    geom = state_of(self).geom
    check_input(geom, x)
    given = mask
    mask, keep_idx, _ = resolve_masks(self, geom, x, mask_ratio, mask, keep_idx)
    latent = encode(self, geom, x, mask, keep_idx)
    return latent_to_fair(latent, geom), mask if given is None else given


def forward_decoder(self: FairModel, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """FAIR's forward_decoder: predictions [B, N, F] of all tokens, row-major, and their mask bool [B, N].

    x [B, L, *final_unit_shape, C] from the encoder, mask bool [B, M]; True = keep in both masks.
    """
    geom = state_of(self).geom
    B, kept = x.shape[:2]
    if on_host_path() and check_mask(mask, B, geom.num_mask_units) != kept:
        raise ValueError(f"the latent holds {kept} mask units a sample, but the mask keeps another number")
    keep_idx, _ = split_mask(mask, kept)
    tokens = run_decoder(self, assemble_decoder(self, geom, latent_from_fair(x, geom), keep_idx), None)
    pred = torch.unflatten(self.decoder_pred(self.decoder_norm(tokens)), 1, (geom.num_mask_units, -1))
    seen = mask.unsqueeze(-1).expand(-1, -1, geom.tokens_per_unit_final)
    return _to_grid(pred, geom), _to_grid(seen, geom)


def _to_grid(tokens: Tensor, geom: Geometry) -> Tensor:
    """Window-major [B, M, S, ...] to row-major [B, N, ...]."""
    grid = units_to_grid(tokens, 1, geom.mask_units_shape, geom.q_stride, geom.final_levels)
    return grid.flatten(1, geom.spatial_dims)


def all_labels(x: Tensor, geom: Geometry) -> Tensor:
    """Normalised labels of all tokens, row-major: [B, N, F]."""
    units = torch.arange(geom.num_mask_units, device=x.device).expand(x.shape[0], -1)
    return _to_grid(masked_label(x, units, geom), geom)


def get_pixel_label_1d(self: FairModel, x: Tensor, mask: Tensor, norm: bool = True) -> Tensor:
    """Labels of a 1-D input, the counterpart of FAIR's get_pixel_label_2d: [masked tokens, pred_stride * C].

    x [B, C, N * pred_stride]; mask bool [B, N], True = masked. Elements in (s, C) order.
    """
    patches = torch.unflatten(x, 2, (-1, self.pred_stride)).permute(0, 2, 3, 1).flatten(2)[mask]
    return normalise(patches) if norm else patches


def _label_override(model: FairModel, dims: int) -> str | None:
    name = f"get_pixel_label_{dims}d"
    return name if name in getattr(model, "_hiera_overrides", ()) else None


def loss_of_rows(
    model: FairModel, x: Tensor, pred: Tensor, mask: Tensor, masked: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss over the masked tokens of pred [B, N, F]; `masked` of each row if known, else boolean indexing."""
    geom = state_of(model).geom
    override = _label_override(model, geom.spatial_dims)
    if override is not None:
        label = getattr(model, override)(x, mask)
    elif masked is None:
        label = all_labels(x, geom)[mask]
    if masked is None:
        pred = pred[mask]
    else:
        rows, _ = split_mask(mask, masked)
        pred = take_rows(pred, rows).flatten(0, 1)
        if override is None:
            label = take_rows(all_labels(x, geom), rows).flatten(0, 1)
    return mae_loss(pred, label), pred, label


def forward_loss(self: FairModel, x: Tensor, pred: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FAIR's forward_loss, for 1-D too: (loss, pred [masked tokens, F], label [masked tokens, F]).

    x the input, pred [B, N, F], mask bool [B, N], here True = *masked*. Rows may differ, as in FAIR's; the
    shape then depends on the mask's values, so torch.compile breaks the graph here.
    """
    return loss_of_rows(self, x, pred, mask, None)


def piecewise_forward(
    self: FairModel,
    x: Tensor,
    mask_ratio: float = 0.6,
    mask: Tensor | None = None,
    keep_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FAIR's forward as three calls, of which a subclass overrides at least one."""
    overrides = self._hiera_overrides
    geom = state_of(self).geom
    if "forward_encoder" in overrides:
        if mask is None and keep_idx is not None:
            mask = mask_from_keep(keep_idx, geom.num_mask_units)
        latent, mask = self.forward_encoder(x, mask_ratio, mask=mask)
    else:
        latent, mask = self.forward_encoder(x, mask_ratio, mask=mask, keep_idx=keep_idx)
    pred, seen = self.forward_decoder(latent, mask)
    if "forward_loss" in overrides:
        return *self.forward_loss(x, pred, ~seen), mask
    masked = pred.shape[1] - latent.shape[1] * geom.tokens_per_unit_final
    return *loss_of_rows(self, x, pred, ~seen, masked), mask
