"""Loss of the masked tokens against the float64 reference and FAIR's own labels."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.geometry import grid_to_units, units_to_grid
from hiera_optim.masks import random_mask
from hiera_optim.ops import mae_loss
from hiera_optim.tables import encode, label_tables
from tests.ops.geometries import MODELS, build


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, g = build(name)
    B, L = 2, max(1, g.num_mask_units // 3)
    _, _, drop = random_mask(B, g.num_mask_units, L, "cpu")
    drop = drop.contiguous()
    x = (torch.randn(B, g.in_chans, *g.input_size) * 3 + 1).to(dtype)
    tables = label_tables(tuple(encode(g)), x.device)
    S = g.tokens_per_unit_final
    pred = torch.randn(drop.numel() * S, g.pred_features).to(dtype)
    wide = pred.double().requires_grad_()
    want = mae_loss.mae_loss_reference(wide, x.double(), drop, tables)
    (want * 3).backward()
    assert wide.grad is not None

    monkeypatch.setattr(torch, "empty_like", lambda t, **k: torch.full_like(t, float("nan"), **k))
    loss, mean, rstd = mae_loss.mae_loss_forward(pred, x, drop, tables)
    grad = mae_loss.mae_loss_backward(torch.tensor(3.0), pred, x, drop, mean, rstd, tables)
    monkeypatch.undo()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=0)
    relative = ((grad.double() - wide.grad).norm() / wide.grad.norm()).item()
    # the interpreter rounds bf16 stores towards zero: twice the error of the hardware
    assert relative < (1e-6 if dtype == torch.float32 else 5e-3)

    if g.spatial_dims == 1:
        return  # FAIR has no 1-D label
    tokens = grid_to_units(torch.arange(len(tables.origin)).view(g.pred_shape), 0, g.mask_units_shape, g.q_stride,
                           g.final_levels)  # fmt: skip
    dropped = torch.zeros(B, len(tables.origin), dtype=torch.bool)
    dropped.scatter_(1, tokens[drop].flatten(1), True)
    label = getattr(model, f"get_pixel_label_{g.spatial_dims}d")(x.double(), dropped)
    full = torch.zeros(B, g.num_mask_units, S, pred.shape[1], dtype=torch.float64)
    full.scatter_(
        1, drop[:, :, None, None].expand(-1, -1, *full.shape[2:]), wide.detach().view(B, -1, S, pred.shape[1])
    )
    spatial = units_to_grid(full, 1, g.mask_units_shape, g.q_stride, g.final_levels).flatten(1, g.spatial_dims)
    fair = ((spatial[dropped] - label) ** 2).mean()
    torch.testing.assert_close(want.detach(), fair, rtol=1e-9, atol=0)
