"""One training step of each contender, built the same way for every benchmark.

`ours` is this repository; `fair` is FAIR's model, eager; `hiera-optim` is the PyPI package of that name (0.2.1) in
its fastest documented setting, imported from a folder of its own (HIERA_OPTIM_DIR) and kept out of this repository.

hiera-optim 0.2.1 does not recognise PyPI's hiera-transformer: it looks for modules named `models.hiera` and
`utils.hiera_utils` and reads `model._grad_checkpointing`. It gets stub modules under those names.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hiera_optim.optim import AdamW, FlatOptimizer, Muon, muon_parameters
from hiera_optim.training import TrainStep

VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 96, "num_heads": 1, "stages": (1, 2, 7, 2)},
    "small": {"embed_dim": 96, "num_heads": 1, "stages": (1, 2, 11, 2)},
    "base": {"embed_dim": 96, "num_heads": 1, "stages": (2, 3, 16, 3)},
    "base-plus": {"embed_dim": 112, "num_heads": 2, "stages": (2, 3, 16, 3)},
    "large": {"embed_dim": 144, "num_heads": 2, "stages": (2, 6, 36, 4)},
    "huge": {"embed_dim": 256, "num_heads": 4, "stages": (2, 6, 36, 4)},
}
ONE_D = {
    "input_size": (1024,), "q_stride": (2,), "mask_unit_size": (8,), "patch_kernel": (31,), "patch_stride": (16,),
    "patch_padding": (15,),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    variant: str = "base"
    batch: int = 128
    channels: int = 8
    dims: int = 2
    q_pool: int = 2
    mask_ratio: float = 0.6
    optimizer: str = "none"
    """none: forward and backward only; adamw; muon."""
    weights: str = "bf16"
    """bf16: pure bf16 weights and state as hiera-optim trains; master: fp32 master weights and clipping (ours)."""
    accumulation: int = 1

    @property
    def name(self) -> str:
        kind = "1-D " if self.dims == 1 else ""
        pool = f" q_pool {self.q_pool}" if self.q_pool != 2 else ""
        rest = f" {self.optimizer}" if self.optimizer != "none" else ""
        rest += " fp32 masters, clipping" if self.weights == "master" else ""
        rest += f" accumulation {self.accumulation}" if self.accumulation > 1 else ""
        return f"{self.variant} {kind}B={self.batch}{pool}{rest}"

    @property
    def input_size(self) -> tuple[int, ...]:
        return (1024,) if self.dims == 1 else (224, 224)


def import_fair() -> types.ModuleType:
    """PyPI's `hiera`, without its FutureWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("hiera")


def build_model(case: Case, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    fair = import_fair()
    torch.manual_seed(0)
    kwargs = {**VARIANTS[case.variant], "q_pool": case.q_pool, "in_chans": case.channels}
    kwargs |= ONE_D if case.dims == 1 else {"input_size": (224, 224)}
    model: nn.Module = fair.MaskedAutoencoderHiera(**kwargs)
    return model.to(device, dtype).train()


def inputs(case: Case, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(case.batch, case.channels, *case.input_size, device="cuda", dtype=dtype)


def fair_step(case: Case) -> Callable[[], Any]:
    """FAIR's own model, eager."""
    if case.dims == 1:
        raise ValueError("FAIR has no 1-D loss")
    model, x = build_model(case), inputs(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if case.optimizer == "adamw" else None

    def step() -> Any:
        loss = model(x, mask_ratio=case.mask_ratio)[0]
        loss.backward()
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def hiera_optim_step(case: Case) -> Callable[[], Any]:
    """hiera-optim 0.2.1: graph_safe and torch.compile(reduce-overhead), its fastest documented setting."""
    fair = import_fair()
    folder = os.environ["HIERA_OPTIM_DIR"]
    sys.path.insert(0, folder)
    for name in [n for n in sys.modules if n == "hiera_optim" or n.startswith("hiera_optim.")]:
        del sys.modules[name]
    hiera, mae, utils = (importlib.import_module(f"hiera.{n}") for n in ("hiera", "hiera_mae", "hiera_utils"))
    stub, stub_utils = types.ModuleType("models.hiera"), types.ModuleType("utils.hiera_utils")
    for module in (utils, hiera, mae):
        stub.__dict__.update({k: v for k, v in vars(module).items() if not k.startswith("__")})
    stub_utils.__dict__.update({k: v for k, v in vars(utils).items() if not k.startswith("__")})
    sys.modules.update({
        "models": types.ModuleType("models"), "models.hiera": stub,
        "utils": types.ModuleType("utils"), "utils.hiera_utils": stub_utils,
    })  # fmt: skip
    package = importlib.import_module("hiera_optim")
    assert str(package.__file__).startswith(folder), package.__file__
    model = build_model(case)
    model._grad_checkpointing = False  # type: ignore[assignment]
    package.optimize(model, graph_safe=True, verbose=False)
    compiled: Any = torch.compile(model, mode="reduce-overhead", dynamic=False)
    x = package.MAEStepInputs(
        model, batch_size=case.batch, in_chans=case.channels, input_size=case.input_size,
        mask_ratio=case.mask_ratio, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    x.x.copy_(inputs(case))
    optimizer = None
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    del fair

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        x.refresh_mask()
        out = compiled(x.x, mask_ratio=case.mask_ratio, mask=x.mask, keep_idx=x.keep_idx)
        out[0].backward()
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return out[0]

    return step


def train_step(case: Case) -> TrainStep:
    """This repository's captured training step; without the update where the case has no optimizer."""
    model = build_model(case)
    master = case.weights == "master"
    options: dict[str, Any] = {"lr": 1e-4, "master": master, "fp32_accumulation": case.accumulation > 1}
    named = list(model.named_parameters())
    optimizer: FlatOptimizer
    if case.optimizer == "muon":
        optimizer = Muon(named, muon=muon_parameters(model), **options)
    else:
        optimizer = AdamW(named, **options)
    train = TrainStep(
        model, optimizer, micro_batch=case.batch, accumulation=case.accumulation, mask_ratio=case.mask_ratio,
        precision="bf16", clip_grad_norm=1.0 if master else None, capture=True,
    )  # fmt: skip
    if case.optimizer == "none":
        train._update = train.forward_backward  # type: ignore[method-assign]
    return train


def our_step(case: Case) -> Callable[[], Any]:
    """This repository: the whole step in one CUDA graph."""
    train, x = train_step(case), inputs(case)
    ids = torch.arange(case.batch, device="cuda")
    train._x.copy_(x)

    def step() -> Any:
        ids.add_(case.batch)
        for _ in range(case.accumulation):
            out = train(train._x, ids)
        return out.loss if out else None

    return step


STEPS = {"ours": our_step, "fair": fair_step, "hiera-optim": hiera_optim_step}
