"""The mask kernel gives bit for bit what the plain path gives."""

from __future__ import annotations

import pytest
import torch

from hiera_optim.masks import sample_mask
from hiera_optim.ops.sample_masks import sample_masks
from hiera_optim.ops.units import unit_slots


@pytest.mark.parametrize(("units", "kept"), [(2, 1), (8, 3), (49, 19), (100, 99), (392, 39), (600, 240)])
@pytest.mark.parametrize("seed", [0, 7, -1, 2**40 + 3])
def test_equals_plain_masks(units: int, kept: int, seed: int) -> None:
    ids = torch.tensor([0, 1, 2**31, 2**32 + 5, 2**62 - 1])
    mask, keep, drop, slot, drop_slot = sample_masks(ids, units, kept, seed)
    want = sample_mask(ids, units, kept, seed)
    for got, plain in zip((mask, keep, drop), want, strict=True):
        assert torch.equal(got, plain)
    assert torch.equal(slot, unit_slots(keep, units))
    assert torch.equal(drop_slot, unit_slots(drop, units))
