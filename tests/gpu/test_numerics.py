"""The public forward and backward against FAIR's model in float64 on the GPU, beside FAIR's own in the same precision.

Not the full product of variants, pooling, mask ratios, precisions, channels, sizes and dimensionalities, but a list in
which every value occurs, most of them several times and together with others. Rounding decides which of two nearly
equal queries a pooling keeps, so batches are large enough for such choices to average out.

Bounds: the loss within 5e-3 of float64 (float32: 1e-5, which is what float32 sums of some 10^8 terms in unlike orders
allow without TF32), the gradient over all parameters no further from float64 than 1.05 times FAIR's own (float32: or
2e-5), predictions no further than 1.1 times FAIR's own, and labels, always float32, within 1e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiera_optim import optimize
from hiera_optim.dispatch import use_kernels
from hiera_optim.encoder import keep_probabilities
from hiera_optim.geometry import Geometry
from hiera_optim.masks import random_mask
from hiera_optim.ops.library import stochastic_depth

from .models import batch_for, distance, fair_model, gradients

pytestmark = pytest.mark.gpu

LINE, VIDEO = (1024,), (16, 128, 128)
FP16_SCALE = 2.0**15
"""A loss scale as GradScaler settles on: without one the gradients of a mean over 10^5 values underflow."""


@dataclass(frozen=True)
class Case:
    variant: str
    q_pool: int
    ratio: float
    precision: str
    channels: int
    size: tuple[int, ...]
    drop_path: float = 0.0
    train: bool = True
    batch: int = 4
    wide_input: bool = False
    """A float32 input into a bfloat16 model."""

    def __str__(self) -> str:
        size = "x".join(map(str, self.size))
        words = [self.variant, f"q{self.q_pool}", str(self.ratio), self.precision, f"{self.channels}ch", size]
        words += [f"drop{self.drop_path}"] * (self.drop_path > 0) + ["eval"] * (not self.train)
        return "-".join(words + ["wide"] * self.wide_input)


CASES = [
    Case("tiny", 1, 0.5, "bf16", 1, (128, 128)),
    Case("tiny", 2, 0.6, "bf16-autocast", 3, (224, 224)),
    Case("tiny", 3, 0.75, "fp16-autocast", 8, (128, 192), batch=16),
    Case("tiny", 2, 0.6, "fp32", 3, (128, 128), train=False),
    Case("small", 1, 0.6, "fp16-autocast", 3, (224, 224)),
    Case("small", 2, 0.75, "fp32", 8, (160, 224)),
    Case("small", 3, 0.5, "bf16", 1, (128, 128), train=False),
    Case("small", 2, 0.6, "bf16", 3, (224, 128), drop_path=0.3, batch=5, train=False),
    Case("base", 2, 0.6, "bf16", 8, (224, 224), drop_path=0.1, batch=8),
    Case("base", 2, 0.6, "bf16", 8, (224, 224), wide_input=True),
    Case("base", 3, 0.6, "bf16-autocast", 1, (192, 128), drop_path=0.2, batch=5),
    Case("base", 1, 0.75, "fp32", 3, (224, 224)),
    Case("base", 2, 0.6, "bf16", 8, LINE, batch=32),
    Case("base", 1, 0.5, "fp16-autocast", 1, (512,), batch=32),
    Case("tiny", 3, 0.75, "fp32", 3, LINE, batch=8),
    Case("base-plus", 2, 0.75, "bf16", 3, (224, 224), drop_path=0.1, batch=5),
    Case("base-plus", 1, 0.5, "bf16-autocast", 8, (128, 128)),
    Case("base-plus", 3, 0.6, "fp32", 1, (128, 192)),
    Case("large", 2, 0.6, "bf16", 3, (224, 224)),
    Case("large", 3, 0.5, "fp16-autocast", 8, (128, 128), drop_path=0.3, batch=5),
    Case("large", 1, 0.75, "bf16-autocast", 1, (224, 128)),
    Case("huge", 2, 0.6, "bf16", 3, (224, 224)),
    Case("huge", 1, 0.6, "fp32", 8, (128, 128)),
    Case("huge", 3, 0.75, "bf16-autocast", 1, (128, 160)),
    Case("base", 2, 0.75, "bf16", 3, VIDEO),
    Case("tiny", 1, 0.6, "bf16-autocast", 1, (4, 224, 224), drop_path=0.2, batch=5),
    Case("small", 3, 0.5, "fp16-autocast", 3, (6, 128, 192)),
    Case("tiny", 2, 0.6, "fp32", 8, (8, 128, 128), train=False),
]

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": nullcontext,
    "fp32": nullcontext,
    "bf16-autocast": partial(torch.autocast, "cuda", torch.bfloat16),
    "fp16-autocast": partial(torch.autocast, "cuda", torch.float16),
}


@dataclass
class Run:
    loss: Tensor
    pred: Tensor
    label: Tensor | None
    gradient: Tensor


class Scale(nn.Module):
    """Multiplies its calls in turn by the rows of `scales`, sample by sample."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.scales, self.calls = scales, 0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scales[self.calls % 2].view(-1, 1, 1)
        self.calls += 1
        return x * scale.to(x.dtype)


def fairs(model: Any, g: Geometry, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """FAIR's loss, predictions and labels; in 1-D, where it has no loss, the documented one on its predictions."""
    if g.spatial_dims > 1:
        loss, pred, label, _ = model(x, mask=mask)
        return loss, pred, label
    latent, _ = model.forward_encoder(x, 0.6, mask=mask)
    pred, pred_mask = model.forward_decoder(latent, mask)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    patch = wide.unfold(2, g.pred_stride, g.pred_stride).permute(0, 2, 3, 1).flatten(2)
    label = ((patch - patch.mean(-1, keepdim=True)) / (patch.var(-1, keepdim=True) + 1e-6) ** 0.5)[~pred_mask]
    pred = pred[~pred_mask]
    return ((pred - label) ** 2).mean(), pred, label


def backward(model: nn.Module, result: tuple[Tensor, Tensor, Tensor | None], scale: float) -> Run:
    loss, pred, label = result
    (loss * scale).backward()
    run = Run(loss.detach(), pred.detach(), label, gradients(model) / scale)
    model.zero_grad(set_to_none=True)
    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case) -> None:
    arguments = {"q_pool": case.q_pool, "in_chans": case.channels, "drop_path_rate": case.drop_path}
    ours = fair_model(case.variant, case.size, **arguments).train(case.train)
    narrow = torch.bfloat16 if case.precision == "bf16" else torch.float32
    ours = ours.to(narrow)
    fair, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    optimize(ours, verbose=False)
    g = Geometry.from_model(ours)
    x = batch_for(ours, case.batch, dtype=torch.float32 if case.wide_input else narrow)
    torch.manual_seed(2)
    mask, keep_idx, _ = random_mask(case.batch, g.num_mask_units, g.num_kept(case.ratio), "cuda")
    if case.drop_path and case.train:
        torch.manual_seed(5)
        scales = stochastic_depth(x, keep_probabilities(ours))
        assert (scales == 0).any()
        for model in (fair, exact):
            for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
                block.drop_path = Scale(scales[2 * i : 2 * i + 2])
    scale = FP16_SCALE if case.precision == "fp16-autocast" else 1.0

    want = backward(exact, fairs(exact, g, x.double(), mask), 1.0)
    with CONTEXTS[case.precision]():
        assert use_kernels(ours, g, x.device) == (case.precision != "fp32")
        theirs = fairs(fair, g, x.to(narrow), mask)
        torch.manual_seed(5)
        loss, pred, label, returned = ours(x, mask_ratio=case.ratio, mask=mask, keep_idx=keep_idx)
    his, mine = backward(fair, theirs, scale), backward(ours, (loss, pred, label), scale)

    assert returned is mask
    assert loss.dtype == label.dtype == torch.float32
    assert mine.pred.shape == want.pred.shape
    fp32 = case.precision == "fp32"
    errors = {
        "loss": (distance(mine.loss, want.loss), distance(his.loss, want.loss)),
        "gradient": (distance(mine.gradient, want.gradient), distance(his.gradient, want.gradient)),
        "pred": (distance(mine.pred, want.pred), distance(his.pred, want.pred)),
    }
    print(case, {name: f"{ours:.2e} (FAIR {fair:.2e})" for name, (ours, fair) in errors.items()})
    assert torch.isfinite(mine.gradient).all()
    assert errors["loss"][0] < (1e-5 if fp32 else 5e-3), errors
    assert errors["gradient"][0] <= max(1.05 * errors["gradient"][1], 2e-5 if fp32 else 0.0), errors
    assert errors["pred"][0] <= max(1.1 * errors["pred"][1], 2e-5 if fp32 else 0.0), errors
    assert mine.label is not None
    assert want.label is not None
    assert distance(mine.label, want.label) < 1e-5
