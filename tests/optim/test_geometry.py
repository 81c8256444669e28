"""Sizes, the Z-order, and the sizes that cannot work."""

from __future__ import annotations

import pytest
import torch

from hiera_optim import Geometry, optimize
from hiera_optim.geometry import grid_to_units, units_to_grid, zorder_index

from .fair import LINE, MODELS, VIDEO, classifier, hiera, mae


def test_zorder_has_the_first_pooling_level_fastest() -> None:
    assert zorder_index((4, 4), 2, (2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert zorder_index((8,), 3, (2,)).tolist() == list(range(8))
    assert zorder_index((1, 2, 2), 1, (1, 2, 2)).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="is not q_stride"):
        zorder_index((4, 8), 2, (2, 2))


@pytest.mark.parametrize("units", [(2, 3), (1, 1)])
def test_cutting_a_grid_into_units_can_be_undone(units: tuple[int, int]) -> None:
    grid = torch.arange(5 * units[0] * 9 * units[1] * 9 * 2).view(5, units[0] * 9, units[1] * 9, 2)
    cut = grid_to_units(grid, 1, units, (3, 3), 2)
    assert cut.shape == (5, units[0] * units[1], 81, 2)
    # Every mask unit is one square of the grid.
    assert torch.equal(cut[0, 0].sort(0).values, grid[0, :9, :9].reshape(81, 2).sort(0).values)
    assert torch.equal(units_to_grid(cut, 1, units, (3, 3), 2), grid)


def test_geometry_of_a_video_model() -> None:
    geom = Geometry.from_model(mae("video"))
    assert geom.input_size == (4, 64, 64)
    assert geom.mask_units_shape == (2, 2, 2)
    assert geom.num_mask_units == 8
    assert geom.tokens_per_mask_unit == 64
    assert geom.final_unit_shape == (1, 2, 2)
    assert geom.tokens_per_unit_final == 4
    assert geom.stages == (1, 1, 2, 1)
    assert geom.pred_stride == 16
    assert geom.pred_features == 16 * 16 * 3
    assert hash(geom) == hash(Geometry.from_model(mae("video")))


@pytest.mark.parametrize("name", MODELS)
def test_geometry_agrees_with_fairs_attributes(name: str) -> None:
    model = mae(name)
    geom = Geometry.from_model(model)
    assert list(geom.tokens_shape) == model.tokens_spatial_shape
    assert list(geom.mask_units_shape) == model.mask_spatial_shape
    assert list(geom.final_unit_shape) == model.mask_unit_spatial_shape_final
    assert list(geom.pred_shape) == model.tokens_spatial_shape_final
    assert geom.pred_features == model.decoder_pred.out_features


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.6, 0.75, 0.8])
def test_kept_mask_units_are_counted_as_fair_counts(ratio: float) -> None:
    model = mae("wide-8-channels")
    mask = model.get_random_mask(torch.zeros(3, 1), ratio)
    assert Geometry.from_model(model).num_kept(ratio) == int(mask[0].sum())


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, 0.9999])
def test_impossible_mask_ratio(ratio: float) -> None:
    with pytest.raises(ValueError, match="mask_ratio"):
        Geometry.from_model(mae()).num_kept(ratio)


@pytest.mark.parametrize("side", [112, 200, 240, 472])
@pytest.mark.parametrize("build", [mae, classifier])
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(side: int, build) -> None:
    with pytest.raises(ValueError, match="multiple of 32") as raised:
        optimize(build(input_size=(side, 64)), verbose=False)
    below = side // 32 * 32
    assert f"nearest valid: {below} or {below + 32}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("size", [(128, 128), (192, 64), (224, 448)])
def test_sizes_that_divide_are_taken(size: tuple[int, int]) -> None:
    assert optimize(mae(input_size=size), verbose=False)


def test_the_smallest_size_has_one_valid_neighbour() -> None:
    with pytest.raises(ValueError, match=r"nearest valid: 32$"):
        optimize(mae(input_size=(16, 64)), verbose=False)


@pytest.mark.parametrize("unit", [(4, 4), (16, 16)])
def test_mae_needs_the_mask_unit_that_pooling_makes(unit: tuple[int, int]) -> None:
    model = mae(mask_unit_size=unit)
    with pytest.raises(ValueError, match=r"need mask_unit_size \(8, 8\)"):
        optimize(model, verbose=False)
    assert type(model) is hiera.MaskedAutoencoderHiera


def test_prediction_patches_must_be_square() -> None:
    model = mae(q_stride=(1, 2), mask_unit_size=(1, 8), input_size=(64, 64))
    with pytest.raises(ValueError, match="must be square"):
        optimize(model, verbose=False)


def test_odd_number_of_frames_is_refused_and_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"dimension 0 is 5 but must be a multiple of 2.*4 or 6"):
        optimize(mae("video", input_size=(5, 64, 64)), verbose=False)


def test_odd_number_of_tokens_along_time_works() -> None:
    assert Geometry.from_model(mae("video-3-tokens")).tokens_shape[0] == 3


def test_patches_that_do_not_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="patch_kernel"):
        optimize(mae(patch_kernel=(7, 7), patch_padding=(1, 1)), verbose=False)


def test_arguments_that_fairs_constructor_drops_are_reported() -> None:
    model = hiera.Hiera((448, 448), embed_dim=8, stages=(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"built for \(224, 224\).*by name"):
        optimize(model, verbose=False)


def test_in_tree_copies_without_a_config_work() -> None:
    model = mae()
    del model.config
    assert Geometry.from_model(model).input_size == (64, 64)


def test_one_and_three_dimensions_are_read() -> None:
    assert Geometry.from_model(mae("line")).q_stride == LINE["q_stride"]
    assert Geometry.from_model(mae("video")).q_stride == VIDEO["q_stride"]
