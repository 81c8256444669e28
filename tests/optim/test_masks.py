"""Masks: FAIR's draws, masks that are a function of the sample, buffers, wrong masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiera_optim import MAEStepInputs, make_mae_mask, sample_mask
from hiera_optim.masks import mask_from_keep, random_mask, split_mask, unwrap

from .fair import batch_for, fast, mae


def test_split_mask_is_ascending_and_complete() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 1, 1, 0]]).bool()
    keep, drop = split_mask(mask, 3)
    assert keep.tolist() == [[0, 3, 4], [1, 2, 3]]
    assert drop.tolist() == [[1, 2], [0, 4]]
    assert torch.equal(mask_from_keep(keep, 5), mask)


def test_random_masks_are_fairs_for_the_same_seed() -> None:
    model = mae("wide-8-channels")
    torch.manual_seed(3)
    expected = model.get_random_mask(torch.zeros(16, 1), 0.5)
    after = torch.rand(1)
    torch.manual_seed(3)
    mask, keep_idx = make_mae_mask(model, 16, 0.5, "cpu")
    assert torch.equal(mask, expected)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(mask_from_keep(keep_idx, 6), mask)
    assert keep_idx.dtype == torch.int64
    assert bool((keep_idx.diff(dim=1) > 0).all())


def test_make_mae_mask_takes_a_generator_and_wrapped_models() -> None:
    wrapped = nn.DataParallel(mae())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = make_mae_mask(wrapped, 4, 0.5, "cpu", generator=torch.Generator().manual_seed(5))
    second = make_mae_mask(wrapped, 4, 0.5, "cpu", generator=torch.Generator().manual_seed(5))
    assert torch.equal(first[0], second[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert unwrap(torch.compile(wrapped)) is wrapped.module


@pytest.mark.parametrize("ratio", [0.0, 0.99, 1.0])
def test_make_mae_mask_refuses_ratios_that_mask_nothing_or_everything(ratio: float) -> None:
    with pytest.raises(ValueError, match="mask_ratio"):
        make_mae_mask(mae(), 2, ratio, "cpu")


def test_sample_masks_depend_on_seed_and_sample_alone() -> None:
    ids = torch.tensor([0, 1, 1 << 40, 7])
    mask, keep, drop = sample_mask(ids, 49, 19, seed=5)
    assert mask.sum(1).tolist() == [19] * 4
    assert torch.equal(torch.cat([keep, drop], 1).sort(1).values, torch.arange(49).expand(4, -1))
    alone = sample_mask(ids[3:], 49, 19, seed=5)[0]
    assert torch.equal(alone[0], mask[3])
    assert len({tuple(row.tolist()) for row in mask}) == 4
    assert not torch.equal(sample_mask(ids, 49, 19, seed=6)[0], mask)
    assert not torch.equal(sample_mask(ids, 49, 19, seed=5 + (1 << 40))[0], mask)


def test_sample_masks_never_change_between_versions() -> None:
    """A resumed run must see the masks it saw before: a change of the hash is a change of the format."""
    mask = sample_mask(torch.tensor([0, 123456789012]), 16, 6, seed=42)[1]
    assert mask.tolist() == [[1, 2, 6, 7, 14, 15], [0, 3, 5, 8, 12, 15]]


def test_sample_masks_are_uniform_and_independent() -> None:
    mask = sample_mask(torch.arange(4000), 49, 19, seed=0)[0].float()
    # Of 4000 draws with probability 19/49 the mean has a standard deviation of 0.0077.
    assert (mask.mean(0) - 19 / 49).abs().max() < 5 * 0.0077
    correlation = torch.corrcoef(mask.T) + 1 / 48
    assert correlation.fill_diagonal_(0).abs().max() < 5 / 4000**0.5
    neighbours = (mask[1:] * mask[:-1]).sum(1).mean() / 49
    assert abs(neighbours - (19 / 49) ** 2) < 0.005


def test_sample_mask_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="num_kept"):
        sample_mask(torch.arange(2), 9, 0, seed=0)
    with pytest.raises(ValueError, match="int64"):
        sample_mask(torch.arange(2).int(), 9, 3, seed=0)


def test_step_inputs_keep_their_addresses() -> None:
    model = mae("wide-8-channels")
    inputs = MAEStepInputs(model, 2, 8, (64, 96), 0.5, "cpu", dtype=torch.float32)
    assert inputs.x.shape == (2, 8, 64, 96)
    assert inputs.mask_ratio == 0.5
    addresses = [t.data_ptr() for t in (inputs.x, inputs.mask, inputs.keep_idx)]
    seen = set()
    for _ in range(20):
        inputs.refresh_mask()
        assert torch.equal(mask_from_keep(inputs.keep_idx, 6), inputs.mask)
        seen.add(tuple(inputs.mask.flatten().tolist()))
    assert len(seen) > 5
    assert addresses == [t.data_ptr() for t in (inputs.x, inputs.mask, inputs.keep_idx)]
    loss = fast(model)(inputs.x, mask_ratio=0.5, mask=inputs.mask, keep_idx=inputs.keep_idx)[0]
    assert torch.isfinite(loss)


def test_step_inputs_refuse_what_the_model_does_not_take() -> None:
    with pytest.raises(ValueError, match="takes 3 channels"):
        MAEStepInputs(mae(), 2, 8, (64, 64), 0.5, "cpu")
    with pytest.raises(ValueError, match=r"\(64, 64\), not 3 of \(224, 224\)"):
        MAEStepInputs(mae(), 2, 3, (224, 224), 0.5, "cpu")


WRONG = {
    "rows keep different numbers": (
        torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]).bool(),
        ValueError,
        "row 0 keeps 1",
    ),
    "float mask": (torch.tensor([[1.0, 0, 0, 0]] * 2), TypeError, "mask must be a bool tensor"),
    "per-token mask": (torch.ones(2, 16).bool(), ValueError, r"mask must be \[2, 4\]"),
    "wrong batch": (torch.ones(3, 4).bool(), ValueError, r"mask must be \[2, 4\]"),
    "nothing kept": (torch.zeros(2, 4).bool(), ValueError, "keeps no mask unit"),
    "everything kept": (torch.ones(2, 4).bool(), ValueError, "nothing to predict"),
    "a list": ([[True, False]], TypeError, "mask must be a bool tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_masks_raise_in_one_line(case: str) -> None:
    mask, error, message = WRONG[case]
    model = mae()
    with pytest.raises(error, match=message) as raised:
        fast(model)(batch_for(model), mask=mask)
    assert "\n" not in str(raised.value)


KEEP = {
    "int32": (torch.tensor([[0], [1]]).int(), TypeError, "int64"),
    "out of range": (torch.tensor([[0], [4]]), ValueError, "ascending mask units from 0 to 3"),
    "negative": (torch.tensor([[-1], [2]]), ValueError, "ascending mask units from 0 to 3"),
    "descending": (torch.tensor([[1, 0], [1, 2]]), ValueError, "ascending"),
    "twice": (torch.tensor([[1, 1], [1, 2]]), ValueError, "ascending"),
    "wrong batch": (torch.tensor([[0]]), ValueError, r"keep_idx must be \[2, 1..4\]"),
    "flat": (torch.tensor([0, 1]), ValueError, r"keep_idx must be \[2, 1..4\]"),
}


@pytest.mark.parametrize("case", KEEP)
def test_wrong_keep_idx_raises_in_one_line(case: str) -> None:
    keep_idx, error, message = KEEP[case]
    model = mae()
    with pytest.raises(error, match=message):
        fast(model)(batch_for(model), keep_idx=keep_idx)


def test_keep_idx_must_belong_to_its_mask() -> None:
    model = mae()
    mask, keep_idx, drop_idx = random_mask(2, 4, 2, "cpu")
    with pytest.raises(ValueError, match="does not name"):
        fast(model)(batch_for(model), mask=mask, keep_idx=drop_idx)
    assert torch.isfinite(fast(model)(batch_for(model), mask=mask, keep_idx=keep_idx)[0])


@pytest.mark.parametrize("ratio", [1.0, -0.5, 0.9, 0.0])
def test_impossible_ratios_raise(ratio: float) -> None:
    model = mae()
    with pytest.raises(ValueError, match=r"mask_ratio|nothing to predict"):
        fast(model)(batch_for(model), mask_ratio=ratio)


def test_wrong_inputs_raise() -> None:
    model = fast(mae())
    with pytest.raises(TypeError, match=r"floating-point tensor, not torch.uint8"):
        model(torch.zeros(2, 3, 64, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"input must be \[B, 3, 64, 64\], not \[2, 3, 64, 96\]"):
        model(torch.zeros(2, 3, 64, 96))
    with pytest.raises(ValueError, match=r"not \[2, 1, 64, 64\]"):
        model(torch.zeros(2, 1, 64, 64))
    with pytest.raises(ValueError, match=r"not \[3, 64, 64\]"):
        model(torch.zeros(3, 64, 64))
