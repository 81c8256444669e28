"""Hiera without a decoder: scores, masked tokens and intermediates are FAIR's, in its shapes and order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .fair import MODELS, batch_for, classifier, distance, fast, hiera, worst_gradient

SIZES = {
    "32-token units": {"mask_unit_size": (4, 4), "q_pool": 3},
    "256-token units": {"input_size": (128, 128), "mask_unit_size": (16, 16), "q_pool": 3},
}


def gradients(model, result: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    result.float().square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_features(ours: tuple[Tensor, list[Tensor]], fairs: tuple[Tensor, list[Tensor]]) -> None:
    assert distance(ours[0], fairs[0]) < 1e-5
    assert len(ours[1]) == len(fairs[1])
    for a, b in zip(ours[1], fairs[1], strict=True):
        assert a.shape == b.shape
        assert distance(a, b) < 1e-5


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_intermediates(name: str, train: bool) -> None:
    model = classifier(name).train(train)
    quick = fast(model)
    x = batch_for(model)
    torch.manual_seed(1)
    fairs = model(x, return_intermediates=True)
    torch.manual_seed(1)
    ours = quick(x, return_intermediates=True)
    assert ours[0].shape == (2, 5)
    assert_same_features(ours, fairs)
    assert worst_gradient(gradients(quick, ours[0]), gradients(model, fairs[0])) < (1e-5, "")
    assert torch.equal(quick.eval()(x), quick([x]))


@pytest.mark.parametrize("name", MODELS)
def test_masked_tokens_and_intermediates(name: str) -> None:
    model = classifier(name).eval()
    quick = fast(model)
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    fairs = model(x, mask, True)
    assert_same_features(quick(x, mask, True), fairs)
    keep_idx = mask.nonzero()[:, 1].view(2, -1)
    assert_same_features(quick(x, return_intermediates=True, keep_idx=keep_idx), fairs)
    assert distance(quick(x, mask), fairs[0]) < 1e-5


def test_all_mask_units_kept_is_the_whole_picture() -> None:
    model = classifier().eval()
    x = batch_for(model)
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert_same_features(fast(model)(x, mask, True), model(x, mask, True))


def test_dropout_of_the_head_draws_as_fair_does() -> None:
    model = classifier(head_dropout=0.5, drop_path_rate=0.3)
    x = batch_for(model, 4)
    torch.manual_seed(2)
    fairs = model(x)
    torch.manual_seed(2)
    assert distance(fast(model)(x), fairs) < 1e-5


@pytest.mark.parametrize("case", SIZES)
def test_other_mask_units_keep_fairs_order_with_fast_attention(case: str) -> None:
    """Only the MAE needs mask units of q_stride ** (stages - 1) tokens; FAIR's classifier takes others."""
    from hiera_optim import MaskUnitAttentionFast

    model = classifier(**SIZES[case]).eval()
    quick = fast(model)
    assert all(isinstance(block.attn, MaskUnitAttentionFast) for block in quick.blocks)
    x = batch_for(model)
    assert_same_features(quick(x, return_intermediates=True), model(x, return_intermediates=True))


def test_unequal_rows_are_refused() -> None:
    model = classifier()
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    with pytest.raises(ValueError, match="row 0 keeps 1, row 1 keeps 2"):
        fast(model)(batch_for(model), mask)


def test_fairs_silent_mixing_of_unequal_rows_is_what_is_refused() -> None:
    """Why: FAIR's own model lets sample 1 change sample 0's tokens when rows keep different numbers."""
    model = classifier().eval()
    x = batch_for(model)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]]).bool()
    other = x.clone()
    other[1] += 1
    assert distance(model(other, mask)[0], model(x, mask)[0]) > 1e-3


def test_the_mae_encoder_alone_as_a_feature_extractor() -> None:
    """super().forward of FAIR's MAE stays reachable and unchanged."""
    from .fair import mae

    model = mae().eval()
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    quick = fast(model)
    direct = hiera.Hiera.forward(quick, x, mask, True)
    assert_same_features(direct, hiera.Hiera.forward(model, x, mask, True))
