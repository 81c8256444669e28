"""The fused path behind the public forward under torch.compile, and with parameters that take no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiera_optim import fast, mae, make_mae_mask, optimize
from hiera_optim.ops import library
from hiera_optim.optim import AdamW
from tests.ops.geometries import build


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(name: str = "2d", **attributes: Any) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, g = build(name)
    optimize(model, verbose=False)
    x = torch.randn(2, g.in_chans, *g.input_size)
    mask, keep_idx = make_mae_mask(model, 2, 0.5, "cpu")
    return model, x, {"mask": mask, "keep_idx": keep_idx}


def run(model: Any, plain: nn.Module, x: Tensor, masks: dict[str, Tensor]) -> list[Tensor]:
    plain.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss, pred, label, _ = model(x, mask_ratio=0.5, **masks)
    loss.backward()
    return [loss.detach(), pred.detach(), label, *(p.grad for p in plain.parameters() if p.grad is not None)]


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_one_graph_with_the_numbers_of_eager(drop_path: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mae, "use_kernels", lambda *_: True)
    model, x, masks = make()
    if drop_path:
        for block in model.blocks:  # type: ignore[union-attr]
            block.drop_path = type(model.blocks[-1].drop_path)()  # type: ignore[index]
            block.drop_path.drop_prob = drop_path
    eager = run(model, model, x, masks)
    compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x, masks)
    assert len(eager) == len(compiled)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_stochastic_depth_keeps_samples_at_the_given_rates() -> None:
    torch.manual_seed(0)
    scales = library.stochastic_depth(torch.empty(20000, 1), [1.0, 0.8])
    assert torch.equal(scales[:2], torch.ones(2, 20000))
    assert set(scales[2:].unique().tolist()) == {0.0, torch.tensor(1 / 0.8).item()}
    kept = scales[2:] > 0
    assert ((kept.float().mean(1) - 0.8).abs() < 5 * (0.8 * 0.2 / 20000) ** 0.5).all()
    assert abs(torch.corrcoef(kept.float())[0, 1]) < 5 / 20000**0.5
    assert not torch.equal(scales, library.stochastic_depth(torch.empty(20000, 1), [1.0, 0.8]))


def test_a_frozen_parameter_gets_no_gradient_and_the_others_theirs() -> None:
    model, x, masks = make()
    frozen = model.blocks[1].mlp.fc1.bias  # type: ignore[union-attr, index]
    frozen.requires_grad_(False)
    drop_idx = (~masks["mask"]).nonzero()[:, 1].view(2, -1)
    geometry = model._hiera_state.geom  # type: ignore[union-attr]

    def loss() -> Tensor:
        return fast.mae_loss(model, geometry, x, masks["mask"], masks["keep_idx"], drop_idx)[0]  # type: ignore[arg-type]

    loss().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    AdamW(model.named_parameters(), lr=1e-3, no_decay=())
    buffers = {p.data_ptr(): p.grad for p in model.parameters() if p.grad is not None}
    with library.direct_gradients(library.GradientSink(buffers, lambda _: None, accumulate=False)):
        loss().backward()
    assert frozen.grad is None
    assert all(torch.equal(p.grad, want[n]) for n, p in model.named_parameters() if n in want)
