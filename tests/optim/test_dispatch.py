"""Which models may run on the fused kernels: only those that compute what FAIR's own code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hiera_optim import Geometry, optimize
from hiera_optim.dispatch import why_not_kernels

from .fair import hiera, mae

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def reason(model: Any, device: torch.device = CUDA) -> str | None:
    return why_not_kernels(model, Geometry.from_model(model), device)


def test_fairs_own_model_in_16_bits_may() -> None:
    assert reason(optimize(mae("image").bfloat16(), verbose=False)) is None
    assert reason(mae("image").half()) is None


def test_other_devices_and_precisions_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mae("image").bfloat16()
    assert reason(model, torch.device("cpu")) == "the model is on cpu"
    assert "float32" in str(reason(model.float()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than Ampere" in str(reason(model.bfloat16()))


@pytest.mark.parametrize("side", ["blocks", "decoder_blocks"])
@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.mlp, "act", nn.GELU(approximate="tanh")),
        lambda block: setattr(block.mlp, "act", nn.ReLU()),
        lambda block: setattr(block, "norm2", nn.RMSNorm(block.dim_out)),
    ],
    ids=["approximate-gelu", "relu", "rms-norm"],
)
def test_one_block_with_other_layers_is_enough(side: str, change: Callable[[Any], None]) -> None:
    model = mae("image").bfloat16()
    change(getattr(model, side)[-1])
    assert reason(model) == "its blocks are not LayerNorm and exact GELU"


def test_a_subclass_with_its_own_loss_may_not() -> None:
    class OwnLoss(hiera.hiera_mae.MaskedAutoencoderHiera):
        def forward_loss(self, x: torch.Tensor, pred: torch.Tensor, mask: torch.Tensor) -> Any:
            return super().forward_loss(x, pred, mask)

    model = mae("image")
    model.__class__ = OwnLoss
    assert reason(optimize(model.bfloat16(), verbose=False)) == "its class has its own forward_loss"


def test_head_dims_that_pytorchs_operators_do_not_take_may_not() -> None:
    assert "heads have 8, 12 channels" in str(
        reason(mae("image", embed_dim=24, num_heads=2, decoder_embed_dim=32, decoder_num_heads=4).bfloat16())
    )
