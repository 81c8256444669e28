"""Receptive fields of kept units against the reference, and through FAIR's own masked convolution."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.geometry import grid_to_units
from hiera_optim.masks import random_mask
from hiera_optim.ops import patch_embed
from hiera_optim.tables import encode, patch_tables
from tests.ops.geometries import MODELS, build


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_patches(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, g = build(name)
    B, L = 2, max(1, g.num_mask_units // 3)
    mask, keep, _ = random_mask(B, g.num_mask_units, L, "cpu")
    x = torch.randn(B, g.in_chans, *g.input_size).to(dtype)
    tables = patch_tables(tuple(encode(g)), x.device)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(*a, float("nan"), **k))
    got = patch_embed.gather_patches(x, mask, keep, tables, dtype)
    monkeypatch.undo()
    assert torch.equal(got, patch_embed.gather_patches_reference(x, mask, keep, tables, dtype))

    proj = model.patch_embed.proj
    weight = proj.weight.detach().flatten(1).double()
    tokens = got[:, : weight.shape[1]].double() @ weight.T + proj.bias.detach().double()
    model.double()
    fair = model.patch_embed(x.double(), mask.view(B, 1, *g.mask_units_shape)).detach()
    grid = fair.view(B, *g.tokens_shape, -1)
    units = grid_to_units(grid, 1, g.mask_units_shape, g.q_stride, g.levels)
    want = units.gather(1, keep[:, :, None, None].expand(-1, -1, *units.shape[2:]))
    torch.testing.assert_close(tokens.view_as(want), want, rtol=1e-9, atol=1e-9)
