"""Weights of another input size: position embeddings resampled on request, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hiera_optim import Geometry, interpolate_position_embeddings, load_weights

from .fair import batch_for, classifier, fast, mae

NAMES = ("pos_embed", "pos_embed_spatial", "pos_embed_temporal", "decoder_pos_embed")
SIZES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "line": ("line", {}, (256,), (384,)),
    "picture": ("image", {}, (64, 64), (96, 128)),
    "smaller picture": ("image", {}, (128, 128), (64, 64)),
    "oblong picture": ("image", {}, (64, 96), (96, 64)),
    "longer video": ("video", {}, (4, 64, 64), (8, 64, 64)),
    "larger video": ("video", {}, (4, 64, 64), (6, 96, 64)),
    "video, one embedding": ("video", {"sep_pos_embed": False}, (4, 64, 64), (8, 96, 64)),
}


def centres(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Where each of `count` tokens of an axis lies, in 0 to 1."""
    return (torch.arange(count, dtype=dtype) + 0.5) / count


def ramp(shape: tuple[int, ...], channels: int) -> Tensor:
    """An embedding [1, N, channels] whose channel c is the place of its token along axis c (mod dimensions)."""
    axes = torch.meshgrid(*[centres(n) for n in shape], indexing="ij")
    return torch.stack([axes[c % len(shape)].flatten() for c in range(channels)], dim=1)[None]


def interior(shape: tuple[int, ...], old: tuple[int, ...]) -> Tensor:
    """bool [N]: tokens whose neighbours in the old grid, two along an axis or four in the plane, all exist."""
    inside = []
    for axis, (new, before) in enumerate(zip(shape, old, strict=True)):
        margin = (0.5 if len(shape) != 2 and axis == 0 else 1.5) / before
        inside.append((centres(new) >= margin) & (centres(new) <= 1 - margin) | torch.tensor(new == before))
    return torch.stack([part.flatten() for part in torch.meshgrid(*inside, indexing="ij")]).all(dim=0)


def grids(model: Any) -> dict[str, tuple[int, ...]]:
    """The grid of tokens of each position embedding that the model has."""
    geom = Geometry.from_model(model)
    every = {
        "pos_embed": geom.tokens_shape,
        "pos_embed_spatial": geom.tokens_shape[1:],
        "pos_embed_temporal": geom.tokens_shape[:1],
        "decoder_pos_embed": geom.pred_shape,
    }
    return {name: shape for name, shape in every.items() if name in model.state_dict()}


@pytest.mark.parametrize("case", SIZES)
def test_a_ramp_stays_one_along_every_axis(case: str) -> None:
    name, changes, before, after = SIZES[case]
    old, new = mae(name, input_size=before, **changes), mae(name, input_size=after, **changes)
    weights = old.state_dict()
    for key, shape in grids(old).items():
        weights[key] = ramp(shape, weights[key].shape[2])
    found = interpolate_position_embeddings(weights, new, input_size=before)
    load_weights(new, found)
    for key, shape in grids(new).items():
        inside = interior(shape, grids(old)[key])
        expected = ramp(shape, found[key].shape[2])
        assert inside.any()
        # Cubic convolution with torch's coefficient bends a ramp by a twentieth of a token; another order of the axes
        # or other centres move it by half a token and more.
        error = (found[key] - expected)[:, inside].abs().amax()
        assert error < 0.1 / max(grids(old)[key])
    assert torch.isfinite(fast(new)(batch_for(new))[0])


def test_pictures_are_resampled_bicubically_as_other_vision_transformers_do() -> None:
    old, new = mae(), mae(input_size=(96, 128))
    weights = old.state_dict()
    found = interpolate_position_embeddings(weights, new)
    for key, (before, after) in {"pos_embed": ((16, 16), (24, 32)), "decoder_pos_embed": ((4, 4), (6, 8))}.items():
        grid = weights[key].reshape(1, *before, -1).permute(0, 3, 1, 2)
        wanted = F.interpolate(grid, size=after, mode="bicubic", align_corners=False, antialias=False)
        torch.testing.assert_close(found[key], wanted.flatten(2).transpose(1, 2))
    assert all(found[key] is weights[key] for key in weights if key not in NAMES)


def test_signals_are_resampled_linearly() -> None:
    old, new = mae("line"), mae("line", input_size=(512,))
    found = interpolate_position_embeddings(old.state_dict(), new)["pos_embed"]
    given = old.state_dict()["pos_embed"]
    torch.testing.assert_close(found[:, 1], 0.75 * given[:, 0] + 0.25 * given[:, 1])
    torch.testing.assert_close(found[:, 2], 0.25 * given[:, 0] + 0.75 * given[:, 1])


@pytest.mark.parametrize("name", ["line", "image", "wide-8-channels", "video", "video-temporal-pooling"])
def test_equal_sizes_leave_every_bit(name: str) -> None:
    model = mae(name)
    weights = model.state_dict()
    found = interpolate_position_embeddings({f"module.{key}": value for key, value in weights.items()}, fast(model))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_what_it_is_given_stays_as_it_was() -> None:
    weights = mae().to(torch.bfloat16).state_dict()
    before = {key: value.clone() for key, value in weights.items()}
    found = interpolate_position_embeddings(weights, mae(input_size=(128, 128)))
    assert found["pos_embed"].dtype == torch.bfloat16
    assert all(torch.equal(weights[key], before[key]) for key in before)


def test_a_classifier_takes_the_encoders_embedding_of_another_size() -> None:
    weights = mae().state_dict()
    model = classifier(input_size=(96, 96))
    missing, unexpected = model.load_state_dict(interpolate_position_embeddings(weights, model), strict=False)
    assert all(key.startswith(("norm.", "head.")) for key in missing)
    assert "decoder_pos_embed" in unexpected
    assert model(batch_for(model)).shape == (2, 5)


def test_a_strict_load_of_another_size_names_the_remedy_and_changes_nothing() -> None:
    model = mae(input_size=(128, 128))
    before = model.state_dict()["pos_embed"].clone()
    with pytest.raises(ValueError, match="interpolate_position_embeddings") as error:
        load_weights(model, mae().state_dict())
    assert "\n" not in str(error.value)
    assert torch.equal(model.state_dict()["pos_embed"], before)
    with pytest.raises(ValueError, match="does not fit") as error:  # more than the size differs
        load_weights(model, mae(in_chans=1).state_dict())
    assert "interpolate_position_embeddings" not in str(error.value)


@pytest.mark.parametrize(
    ("weights", "model", "size", "words"),
    [
        (lambda: mae("wide-8-channels"), lambda: mae(), None, "384 tokens.*not square.*input_size"),
        (lambda: mae(), lambda: mae(input_size=(96, 96)), (96, 64), r"input_size \(96, 64\).*384 tokens.*256"),
        (lambda: mae(), lambda: mae(input_size=(96, 96)), (64,), "2 dimensions"),
        (lambda: mae(), lambda: mae(input_size=(96, 96)), (64.5, 64), "whole numbers"),
        (lambda: mae(), lambda: mae(input_size=(96, 96), embed_dim=16), None, "pos_embed has 8 channels.*16"),
        (lambda: mae(), lambda: mae("video"), None, "pos_embed_spatial.*not in the checkpoint"),
        (
            lambda: mae("video", sep_pos_embed=False),
            lambda: mae("video", sep_pos_embed=False, input_size=(8, 64, 64)),
            None,
            "give its input_size",
        ),
        (lambda: mae("line"), lambda: mae("line", input_size=(512,), q_pool=1), None, "decoder_pos_embed.*q_pool"),
    ],
)
def test_what_cannot_be_resampled_is_said_in_one_line(weights: Any, model: Any, size: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        interpolate_position_embeddings(weights().state_dict(), model(), input_size=size)
    assert "\n" not in str(error.value)
