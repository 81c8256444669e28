"""The whole fused model against FAIR's own, in float64: loss, predictions and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hiera_optim import fast
from hiera_optim.geometry import Geometry, units_to_grid
from hiera_optim.masks import random_mask
from hiera_optim.ops import library
from tests.ops.geometries import MODELS, build


def fair_loss(model: nn.Module, g: Geometry, x: Tensor, mask: Tensor) -> Tensor:
    if g.spatial_dims > 1:
        loss: Tensor = model(x, mask=mask)[0]
        return loss
    latent, _ = model.forward_encoder(x, 0.5, mask=mask)
    pred, pred_mask = model.forward_decoder(latent, mask)
    patch = x.unfold(2, g.pred_stride, g.pred_stride).permute(0, 2, 3, 1).flatten(2)  # (s, C), as documented
    label = (patch - patch.mean(-1, keepdim=True)) / (patch.var(-1, keepdim=True) + 1e-6) ** 0.5
    return ((pred - label)[~pred_mask] ** 2).mean()


def gradient_error(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    wanted = dict(reference.named_parameters())
    out = {}
    for name, p in model.named_parameters():
        want = wanted[name].grad
        assert (p.grad is None) == (want is None), name
        if p.grad is not None and want is not None:
            out[name] = ((p.grad.double() - want).norm() / want.norm().clamp(min=1e-12)).item()
    return out


def make(name: str, batch: int = 2) -> tuple[nn.Module, nn.Module, Geometry, Tensor, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    model, g = build(name)
    for p in model.parameters():  # biases and norms start at 0 and 1, where wrong gradients can hide
        p.data += 0.05 * torch.randn_like(p)
    masks = random_mask(batch, g.num_mask_units, max(1, g.num_mask_units // 3), "cpu")
    x = torch.randn(batch, g.in_chans, *g.input_size)
    return model, copy.deepcopy(model).double(), g, x, masks


@pytest.mark.parametrize("name", MODELS)
def test_equals_fair(name: str) -> None:
    model, reference, g, x, (mask, keep, drop) = make(name)
    want = fair_loss(reference, g, x.double(), mask)
    want.backward()
    loss, pred = fast.mae_loss(model, g, x, mask, keep, drop)
    loss.backward()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=0)
    worst = max(gradient_error(model, reference).items(), key=lambda item: item[1])
    assert worst[1] < 1e-5, worst
    if g.spatial_dims > 1:
        full = torch.zeros(x.shape[0], g.num_mask_units, g.tokens_per_unit_final, pred.shape[1])
        index = drop[:, :, None, None].expand(-1, -1, *full.shape[2:])
        full.scatter_(1, index, pred.detach().view(*drop.shape, *full.shape[2:]))
        spatial = units_to_grid(full, 1, g.mask_units_shape, g.q_stride, g.final_levels).flatten(1, g.spatial_dims)
        ours = spatial[~units_mask(g, mask)]
        torch.testing.assert_close(ours.double(), reference(x.double(), mask=mask)[1].detach(), rtol=1e-4, atol=1e-5)


def units_mask(g: Geometry, mask: Tensor) -> Tensor:
    """[B, tokens] at the decoder's resolution, row-major: True where the unit is kept."""
    per_unit = mask[:, :, None].expand(-1, -1, g.tokens_per_unit_final)
    return units_to_grid(per_unit, 1, g.mask_units_shape, g.q_stride, g.final_levels).flatten(1)


@pytest.mark.parametrize("recompute", [True, False])
def test_direct_gradients_and_recompute(recompute: bool) -> None:
    """Gradients written straight into buffers, and recomputed activations, are bitwise those of autograd."""
    model, _, g, x, (mask, keep, drop) = make("2d")
    fast.mae_loss(model, g, x, mask, keep, drop)[0].backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=False)
    if recompute:
        model._hiera_checkpoint = frozenset(range(len(model.blocks)))
        model._hiera_checkpoint_decoder = True
    ready: list[int] = []
    buffers = {p.data_ptr(): p.grad for p in model.parameters() if p.grad is not None}
    sink = library.GradientSink(buffers, ready.extend, accumulate=False)
    loss = fast.mae_loss(model, g, x, mask, keep, drop)[0]
    with library.direct_gradients(sink):
        loss.backward()
    for name, p in model.named_parameters():
        if name in want:
            torch.testing.assert_close(p.grad, want[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    chained = [p.data_ptr() for b in [*model.blocks, *model.decoder_blocks] for p in b.parameters()]
    assert len(ready) == len(set(ready)), "a gradient was announced twice"
    assert set(chained) <= set(ready)


def test_stochastic_depth() -> None:
    """Per-sample factors on both branches of every block, against FAIR's blocks with the same factors."""
    model, reference, g, x, (mask, keep, drop) = make("2d", batch=3)
    scales = torch.rand(2 * len(model.blocks), 3) * 2
    scales[:, 1] = 0.0
    for i, b in enumerate(reference.blocks):
        b.drop_path = Scale(scales[2 * i : 2 * i + 2].double())
    want = fair_loss(reference, g, x.double(), mask)
    want.backward()
    loss, _ = fast.mae_loss(model, g, x, mask, keep, drop, scales)
    loss.backward()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=0)
    worst = max(gradient_error(model, reference).items(), key=lambda item: item[1])
    assert worst[1] < 1e-5, worst


class Scale(nn.Module):
    """Multiplies its first call by scales[0] and its second by scales[1], sample by sample."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.scales, self.calls = scales, 0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scales[self.calls % 2].view(-1, 1, 1)
        self.calls += 1
        return x * scale


def test_two_input_sizes_in_one_process() -> None:
    """Six mask units are dropped of 8 here and of 12 there: decoders of one output and two inputs."""
    for units, name in ((8, "3d"), (12, "2d")):
        model, reference, g, x, _ = make(name)
        assert g.num_mask_units == units
        mask, keep, drop = random_mask(2, units, units - 6, "cpu")
        want = fair_loss(reference, g, x.double(), mask)
        want.backward()
        fast.mae_loss(model, g, x, mask, keep, drop)[0].backward()
        worst = max(gradient_error(model, reference).items(), key=lambda item: item[1])
        assert worst[1] < 1e-5, worst


@pytest.mark.parametrize(
    ("marked", "want"),
    [
        ([False] * 20, [8, 8, 4]),
        ([True] * 3, [1, 1, 1]),
        ([False] * 2 + [True] * 2 + [False] * 9, [2, 1, 1, 8, 1]),  # a stage inside a run of blocks
        ([True, False, True], [1, 1, 1]),
        ([False], [1]),
    ],
)
def test_a_block_that_recomputes_is_an_operator_of_its_own(marked: list[bool], want: list[int]) -> None:
    parts = fast.chunks(marked)
    assert [len(part) for part in parts] == want
    assert [i for part in parts for i in part] == list(range(len(marked)))
    assert all(len({marked[i] for i in part}) == 1 for part in parts)
