"""Where FAIR has no loss: one dimension, and pooling along time. The definitions, written out plainly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .fair import batch_for, distance, fast, hiera, mae, run, worst_gradient


def normalised(patch: Tensor) -> Tensor:
    return (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()


def line_label(x: Tensor, token: int, size: int) -> Tensor:
    """Samples of one token, time first, then channel."""
    return normalised(torch.stack([x[:, token * size + t] for t in range(size)]).flatten())


def video_label(x: Tensor, place: tuple[int, int, int], frames: int, size: int) -> Tensor:
    """The first frame of one token: rows, columns, channels."""
    t, y, w = place
    patch = x[:, t * frames, y * size : (y + 1) * size, w * size : (w + 1) * size]
    return normalised(patch.permute(1, 2, 0).flatten())


def fairs_pieces(model, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """FAIR's encoder and decoder: predictions of the masked tokens, and which they are."""
    latent, _ = hiera.MaskedAutoencoderHiera.forward_encoder(model, x, 0.6, mask=mask)
    pred, seen = hiera.MaskedAutoencoderHiera.forward_decoder(model, latent, mask)
    return pred, seen


@pytest.mark.parametrize("name", ["line", "video-temporal-pooling"])
def test_label_and_loss_and_gradients(name: str) -> None:
    model = mae(name)
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.6)
    ours = run(fast(model), x, mask=mask)
    pred, seen = fairs_pieces(model, x, mask)
    rows = []
    for b in range(2):
        for token in (~seen[b]).nonzero().flatten().tolist():
            if name == "line":
                rows.append(line_label(x[b], token, 16))
            else:
                grid = model.tokens_spatial_shape_final
                place = (token // (grid[1] * grid[2]), token // grid[2] % grid[1], token % grid[2])
                rows.append(video_label(x[b], place, frames=4, size=8))
    label = torch.stack(rows)
    loss = ((pred[~seen] - label) ** 2).mean()
    assert ours.pred.shape == label.shape
    assert distance(ours.pred, pred[~seen]) < 1e-5
    assert distance(ours.label, label) < 1e-6
    assert distance(ours.loss, loss) < 1e-6
    model.zero_grad()
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    assert worst_gradient(ours.gradients, expected) < (1e-5, "")


def test_fair_itself_has_no_one_dimensional_loss() -> None:
    model = mae("line")
    with pytest.raises(NotImplementedError):
        model(batch_for(model))


def test_the_label_method_of_one_dimension_is_offered_like_fairs() -> None:
    model = fast(mae("line"))
    x = batch_for(model)
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[:, 3] = True
    label = model.get_pixel_label_1d(x, mask)
    assert distance(label[1], line_label(x[1], 3, 16)) < 1e-6
    raw = model.get_pixel_label_1d(x, mask, norm=False)
    assert torch.equal(raw[0].view(16, 2), x[0, :, 48:64].T)


@pytest.mark.parametrize("precision", ["bf16 autocast", "pure bf16"])
def test_one_dimension_in_bf16(precision: str) -> None:
    model = fast(mae("line"))
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    exact = run(model, x, mask=mask)
    if precision == "pure bf16":
        rounded = run(model.bfloat16(), x.bfloat16(), mask=mask)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            rounded = run(model, x, mask=mask)
    assert rounded.loss.dtype == torch.float32
    assert distance(rounded.loss, exact.loss) < 1e-2
