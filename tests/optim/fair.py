"""Small FAIR models, one of each kind, and how an optimised model is compared with FAIR's own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hiera_optim import import_hiera, optimize

hiera = import_hiera()

DECODER = {"decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 2}
SMALL = {"embed_dim": 8, "num_heads": 1, "stages": (1, 1, 2, 1)}
LINE = {
    "q_stride": (2,),
    "mask_unit_size": (8,),
    "patch_kernel": (7,),
    "patch_stride": (4,),
    "patch_padding": (3,),
}
VIDEO = {
    "q_stride": (1, 2, 2),
    "mask_unit_size": (1, 8, 8),
    "patch_kernel": (3, 7, 7),
    "patch_stride": (2, 4, 4),
    "patch_padding": (1, 3, 3),
    "sep_pos_embed": True,
}

MODELS: dict[str, dict[str, Any]] = {
    "image": {"input_size": (64, 64), "q_pool": 2, "in_chans": 3},
    "wide-8-channels": {"input_size": (64, 96), "q_pool": 2, "in_chans": 8},
    "tall-1-channel": {"input_size": (96, 64), "q_pool": 1, "in_chans": 1},
    "q_pool-0": {"input_size": (64, 64), "q_pool": 0, "in_chans": 3},
    "q_pool-3": {"input_size": (64, 64), "q_pool": 3, "in_chans": 3},
    "windows-everywhere": {"input_size": (64, 64), "q_pool": 3, "mask_unit_attn": (True,) * 4},
    "global-everywhere": {"input_size": (64, 64), "q_pool": 2, "mask_unit_attn": (False,) * 4},
    "heads": {"input_size": (64, 64), "q_pool": 2, "embed_dim": 16, "num_heads": 2},
    "three-stages": {"input_size": (64, 64), "q_pool": 2, "stages": (1, 2, 1), "mask_unit_size": (4, 4)},
    "q_stride-3": {
        "input_size": (72, 72),
        "q_pool": 2,
        "stages": (1, 1, 1),
        "q_stride": (3, 3),
        "mask_unit_size": (9, 9),
        "patch_kernel": (3, 3),
        "patch_stride": (2, 2),
        "patch_padding": (1, 1),
    },
    "plain-patches": {
        "input_size": (64, 64),
        "q_pool": 2,
        "patch_kernel": (4, 4),
        "patch_stride": (4, 4),
        "patch_padding": (0, 0),
    },
    "drop-path": {"input_size": (64, 64), "q_pool": 2, "drop_path_rate": 0.5},
    "video": {"input_size": (4, 64, 64), "q_pool": 2, **VIDEO},
    "video-3-tokens": {"input_size": (6, 64, 32), "q_pool": 3, "in_chans": 1, **VIDEO},
    "line": {"input_size": (256,), "q_pool": 2, "in_chans": 2, **LINE},
    "video-temporal-pooling": {
        "input_size": (16, 32, 32),
        "q_pool": 1,
        **VIDEO,
        "stages": (1, 1, 1),
        "q_stride": (2, 2, 2),
        "mask_unit_size": (4, 4, 4),
    },
}
WITH_FAIR_LOSS = [name for name in MODELS if name not in ("line", "video-temporal-pooling")]


def model_arguments(name: str, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "in_chans": 3, **MODELS[name], **changes}


@cache
def _mae(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = hiera.MaskedAutoencoderHiera(**DECODER, **model_arguments(name))
    # FAIR starts biases at zero and LayerNorms at one: move them, so that a forgotten one shows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def mae(name: str = "image", **changes: Any) -> Any:
    """A fresh copy of a small MAE with the same weights every time."""
    if changes:
        torch.manual_seed(0)
        return hiera.MaskedAutoencoderHiera(**{**DECODER, **model_arguments(name), **changes})
    return copy.deepcopy(_mae(name))


def classifier(name: str = "image", **changes: Any) -> Any:
    torch.manual_seed(0)
    return hiera.Hiera(**{"num_classes": 5, "head_init_scale": 1.0, **model_arguments(name), **changes})


def fast(model: Any, **options: Any) -> Any:
    """An optimised copy."""
    return optimize(copy.deepcopy(model), verbose=False, **options)


def batch_for(model: Any, size: int = 2, seed: int = 1) -> Tensor:
    from hiera_optim import Geometry

    geom = Geometry.from_model(model)
    return torch.randn(size, geom.in_chans, *geom.input_size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Outcome:
    loss: Tensor
    pred: Tensor
    label: Tensor
    mask: Tensor
    gradients: dict[str, Tensor]


def run(model: Any, x: Tensor, *args: Any, seed: int = 7, **kwargs: Any) -> Outcome:
    """One forward and backward from a given seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, pred, label, mask = model(x, *args, **kwargs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), pred.detach(), label.detach(), mask, gradients)


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def worst_gradient(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    assert a.keys() == b.keys()
    return max((distance(a[name], b[name]), name) for name in b)


def assert_equal_runs(ours: Outcome, fairs: Outcome, loss: float = 1e-6, gradient: float = 1e-5) -> None:
    assert torch.equal(ours.mask, fairs.mask)
    assert ours.pred.shape == fairs.pred.shape
    assert ours.label.shape == fairs.label.shape
    assert distance(ours.loss, fairs.loss) < loss
    assert distance(ours.pred, fairs.pred) < gradient
    assert distance(ours.label, fairs.label) < gradient
    assert worst_gradient(ours.gradients, fairs.gradients) < (gradient, "")
