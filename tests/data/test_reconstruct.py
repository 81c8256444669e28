"""Reconstruction pictures: the geometry is FAIR's, and a perfect prediction gives the original back."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hiera_optim.geometry import Geometry
from hiera_optim.masks import sample_mask
from service.errors import UserError
from service.train.drawing import draw_samples, save_png
from service.train.reconstruct import from_patches, hidden_tokens, paste, to_patches, write_pictures

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    from hiera.hiera_mae import MaskedAutoencoderHiera

SMALL = {"embed_dim": 8, "stages": (1, 1, 1), "mask_unit_attn": (True, True, False), "num_heads": 1}
DECODER = {"decoder_embed_dim": 8, "decoder_depth": 1, "decoder_num_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "2d": {"input_size": (32, 48), "mask_unit_size": (4, 4), "q_pool": 1, "in_chans": 3},
    "2d-one-token-a-unit": {"input_size": (48, 32), "mask_unit_size": (4, 4), "q_pool": 2, "in_chans": 1},
    "3d": {
        "input_size": (8, 32, 48),
        "q_stride": (1, 2, 2),
        "mask_unit_size": (1, 4, 4),
        "patch_kernel": (3, 7, 7),
        "patch_stride": (2, 4, 4),
        "patch_padding": (1, 3, 3),
        "q_pool": 1,
        "in_chans": 3,
    },
    "1d": {
        "input_size": (128,),
        "q_stride": (2,),
        "mask_unit_size": (4,),
        "patch_kernel": (7,),
        "patch_stride": (4,),
        "patch_padding": (3,),
        "q_pool": 1,
        "in_chans": 5,
    },
}


def make(case: str) -> tuple[Any, Geometry, torch.Tensor, torch.Tensor]:
    """(model, geometry, x, keep mask) of a small model."""
    torch.manual_seed(0)
    model = MaskedAutoencoderHiera(**SMALL, **DECODER, **CASES[case])
    geom = Geometry.from_model(model)
    x = torch.rand(3, geom.in_chans, *geom.input_size)
    kept = geom.num_kept_for_loss(0.6)
    mask, _, _ = sample_mask(torch.arange(3), geom.num_mask_units, kept, seed=1)
    return model, geom, x, mask


@pytest.mark.parametrize("case", CASES)
def test_patches_and_back(case: str) -> None:
    _, geom, x, _ = make(case)
    back = from_patches(to_patches(x, geom), geom)
    assert torch.equal(back, x[:, :, :: geom.frame_stride] if geom.spatial_dims == 3 else x)


@pytest.mark.parametrize("case", ["2d", "2d-one-token-a-unit", "3d"])
def test_a_perfect_prediction_gives_the_original_back(case: str) -> None:
    """The label that FAIR's own code computes is a perfect prediction."""
    model, geom, x, mask = make(case)
    _, pred, label, _ = model(x, 0.6, mask=mask)
    original, made, hidden = paste(x, label, mask, geom)
    assert torch.allclose(made, original, atol=1e-6)
    _, wrong, _ = paste(x, pred, mask, geom)
    assert torch.equal(wrong.movedim(1, -1)[~hidden], original.movedim(1, -1)[~hidden])
    assert (wrong - original).abs().amax(1)[hidden].mean() > 0.05


def test_a_perfect_prediction_of_a_signal_gives_the_original_back() -> None:
    _, geom, x, mask = make("1d")
    patches = x.unfold(2, geom.pred_stride, geom.pred_stride).permute(0, 2, 3, 1).flatten(2)
    label = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6) ** 0.5
    original, made, _ = paste(x, label[hidden_tokens(mask, geom)], mask, geom)
    assert torch.equal(original, x)
    assert torch.allclose(made, x, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_hidden_is_exactly_what_the_encoder_does_not_see(case: str) -> None:
    """FAIR zeroes masked input before the patch embedding: the same pixels are hidden here."""
    _, geom, x, mask = make(case)
    _, _, hidden = paste(x, torch.zeros(int(hidden_tokens(mask, geom).sum()), geom.pred_features), mask, geom)
    seen = torch.nn.functional.interpolate(mask.view(3, 1, *geom.mask_units_shape).float(), size=geom.input_size)[
        :, 0
    ].bool()
    if geom.spatial_dims == 3:
        seen = seen[:, :: geom.frame_stride]
    assert torch.equal(hidden, ~seen)
    assert math.isclose(float((~hidden).float().mean()), float(mask.float().mean()), rel_tol=1e-6)


@pytest.mark.parametrize("case", ["2d", "3d"])
def test_the_file_shows_one_row_a_sample_or_frame(case: str, tmp_path: Path) -> None:
    model, geom, x, _ = make(case)
    path = tmp_path / "reconstructions" / "a.png"
    model.train()
    write_pictures(model, x, torch.arange(3), path, seed=0, mask_ratio=0.6, mean=(0.1,) * 3, std=(0.5,) * 3)
    assert model.training
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]
    factor = max(1, round(200 / max(geom.input_size[-2:])))
    height, width = (n * factor for n in geom.input_size[-2:])
    rows = 3 * (4 if case == "3d" else 1)
    with Image.open(path) as picture:
        assert picture.size == (3 * width + 8, 18 + rows * (height + 4) - 4)


def test_the_original_is_shown_with_its_own_colours_and_hidden_parts_in_grey() -> None:
    original = np.zeros((1, 3, 8, 8), dtype=np.float32)
    original[0, 0] = 1.0
    made = np.zeros_like(original)
    made[0, 1] = 1.0
    hidden = np.zeros((1, 8, 8), dtype=np.bool_)
    hidden[0, :, :4] = True
    pixels = np.asarray(draw_samples(original, made, hidden))
    middle = 18 + 100
    assert pixels[middle, 50].tolist() == [255, 0, 0]
    assert pixels[middle, 204 + 40].tolist() == [128, 128, 128]
    assert pixels[middle, 204 + 160].tolist() == [255, 0, 0]
    assert pixels[middle, 408 + 50].tolist() == [0, 255, 0]


def test_values_outside_the_unit_range_are_stretched() -> None:
    original = np.linspace(-5, 5, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    pixels = np.asarray(draw_samples(original, original, np.zeros((1, 8, 8), dtype=np.bool_)))
    assert pixels[18:, :200].min() < 5
    assert pixels[18:, :200].max() > 250


def test_signals_are_lines_and_only_the_reconstruction_is_coloured() -> None:
    t = np.linspace(0, 20, 128, dtype=np.float32)
    original = np.stack([np.sin(t), np.cos(t)])[None]
    hidden = np.zeros((1, 128), dtype=np.bool_)
    hidden[0, 32:64] = True
    pixels = np.asarray(draw_samples(original, -original, hidden)).astype(int)
    coloured = (pixels[..., 0] - pixels[..., 2]) > 100
    column = pixels.shape[1] // 3
    assert not coloured[:, : 2 * column].any()
    assert coloured[:, 2 * column :].any()
    # A constant channel and one sample a stretch draw without trouble.
    draw_samples(np.zeros((1, 9, 4), np.float32), np.ones((1, 9, 4), np.float32), hidden[:, 30:34])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*a\.png"):
        save_png(Image.new("RGB", (2, 2)), tmp_path / "file" / "a.png")
