"""FAIR's variants built on the GPU, small steps, and how two runs are compared."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hiera_optim import import_hiera, optimize
from hiera_optim.geometry import Geometry
from hiera_optim.optim import AdamW, FlatOptimizer, Muon, muon_parameters
from hiera_optim.training import TrainStep

VARIANTS: dict[str, dict[str, Any]] = {
    # every kind of block once: for tests of mechanisms
    "small-test": {"embed_dim": 96, "num_heads": 1, "stages": (1, 1, 2, 1), "decoder_depth": 2},
    "tiny": {"embed_dim": 96, "num_heads": 1, "stages": (1, 2, 7, 2)},
    "small": {"embed_dim": 96, "num_heads": 1, "stages": (1, 2, 11, 2)},
    "base": {"embed_dim": 96, "num_heads": 1, "stages": (2, 3, 16, 3)},
    "base-plus": {"embed_dim": 112, "num_heads": 2, "stages": (2, 3, 16, 3)},
    "large": {"embed_dim": 144, "num_heads": 2, "stages": (2, 6, 36, 4)},
    "huge": {"embed_dim": 256, "num_heads": 4, "stages": (2, 6, 36, 4)},
}
LINE = {
    "q_stride": (2,), "mask_unit_size": (8,), "patch_kernel": (31,), "patch_stride": (16,), "patch_padding": (15,),
}  # fmt: skip
VIDEO = {
    "q_stride": (1, 2, 2), "mask_unit_size": (1, 8, 8), "patch_kernel": (3, 7, 7), "patch_stride": (2, 4, 4),
    "patch_padding": (1, 3, 3), "sep_pos_embed": True,
}  # fmt: skip


def fair_model(variant: str, size: tuple[int, ...], *, seed: int = 0, **arguments: Any) -> nn.Module:
    """FAIR's masked autoencoder, fp32 on the GPU, its biases and norms moved away from 0 and 1."""
    kind = {1: LINE, 2: {}, 3: VIDEO}[len(size)]
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model: nn.Module = import_hiera().MaskedAutoencoderHiera(
            **{**VARIANTS[variant], **kind, "input_size": size, **arguments}
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def fast_model(dtype: torch.dtype = torch.bfloat16, size: tuple[int, ...] = (128, 128), **arguments: Any) -> Any:
    """A small optimised model."""
    return optimize(fair_model("small-test", size, **arguments).to(dtype), verbose=False)


def batch_for(model: nn.Module, batch: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    g = Geometry.from_model(model)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, g.in_chans, *g.input_size, device="cuda", generator=generator).to(dtype)


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def gradients(model: nn.Module) -> Tensor:
    """All gradients, one after the other, in float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """An operation that makes the host wait for the device raises RuntimeError in here."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass
class Trainer:
    """A model, its optimizer and its step; `start` holds the first weights."""

    model: Any
    optimizer: FlatOptimizer
    step: TrainStep
    start: Tensor

    @property
    def weights(self) -> Tensor:
        """Masters where there are any."""
        master = self.optimizer.master
        return self.optimizer.params.flat if master is None else master

    @property
    def movement(self) -> Tensor:
        """What training has changed, in float64."""
        return self.weights.double() - self.start.double()


def trainer(
    *, kind: str = "adamw", micro_batch: int = 4, accumulation: int = 1, capture: bool = True, lr: float = 1e-3,
    dtype: torch.dtype = torch.bfloat16, model: Any = None, fp32_accumulation: bool = True, **arguments: Any,
) -> Trainer:  # fmt: skip
    """A step in the training default: bf16 compute, fp32 masters, clipping."""
    model = fast_model(dtype, **arguments) if model is None else model
    options: dict[str, Any] = {
        "lr": lr,
        "no_decay": (),
        "master": True,
        "fp32_accumulation": fp32_accumulation and accumulation > 1,
    }
    named = list(model.named_parameters())
    optimizer: FlatOptimizer
    if kind == "muon":
        optimizer = Muon(named, muon=muon_parameters(model), **options)
    else:
        optimizer = AdamW(named, **options)
    step = TrainStep(
        model, optimizer, micro_batch=micro_batch, accumulation=accumulation, capture=capture,
        clip_grad_norm=1.0, precision="bf16" if dtype == torch.bfloat16 else "fp32",
    )  # fmt: skip
    made = Trainer(model, optimizer, step, torch.empty(0))
    made.start = made.weights.clone()
    return made


def train(run: Trainer, steps: int, *, first: int = 0, order: Tensor | None = None) -> list[Tensor]:
    """Runs optimizer steps `first` to `first + steps` on data that depends on the step alone; returns the losses.

    order: a permutation of the global batch; the mathematics stays, the order of the sums changes.
    """
    losses = []
    per_step = run.step.micro_batch * run.step.accumulation
    for i in range(first, first + steps):
        x = batch_for(run.model, per_step, seed=i)
        ids = torch.arange(i * per_step, (i + 1) * per_step, device="cuda")
        if order is not None:
            x, ids = x[order], ids[order]
        report = None
        for part, part_ids in zip(x.chunk(run.step.accumulation), ids.chunk(run.step.accumulation), strict=True):
            report = run.step(part, part_ids)
        assert report is not None
        losses.append(report.loss.clone())
    return losses
