"""The model and optimizer of a run, and their way into and out of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiera_optim.checkpointing import enable_stage_checkpointing
from hiera_optim.compat import import_hiera
from hiera_optim.optim.adamw import AdamW, no_decay_parameters
from hiera_optim.optim.flat import FlatOptimizer
from hiera_optim.optim.muon import Muon, muon_parameters
from hiera_optim.optimize import optimize
from hiera_optim.training import PRECISIONS
from service.config.schema import ModelSection, OptimSection, RunConfig, TrainSection
from service.errors import UserError
from service.train.checkpoint import FORMAT, check_same_shapes, load_tensors


def build_fair_model(section: ModelSection, seed: int) -> nn.Module:
    """FAIR's MaskedAutoencoderHiera with fp32 weights drawn from `seed`, on the CPU: the same on every
    machine.

    Raises:
        UserError: FAIR's code refuses the sizes (service.config.checks finds most of these earlier).
    """
    fair = import_hiera().hiera_mae.MaskedAutoencoderHiera
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = fair(**section.hiera_arguments())
        except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
            why = str(error) or type(error).__name__
            raise UserError(f"the model section describes no Hiera: {why}") from error
    return model


def build_model(section: TrainSection, fair: nn.Module, device: torch.device, precision: str) -> nn.Module:
    """FAIR's model, optimised, on `device`, in the compute precision "fp32" or "bf16".

    Raises:
        UserError: hiera_optim has no fast path for these sizes.
    """
    try:
        model = optimize(fair, verbose=False)
        if section.activation_checkpointing is not None:
            enable_stage_checkpointing(model, section.activation_checkpointing)
    except ValueError as error:
        raise UserError(f"model, train.activation_checkpointing: {error}") from error
    return model.to(device, PRECISIONS[precision]).train()


def build_optimizer(model: nn.Module, optim: OptimSection, peak: float, weights: Mapping[str, Tensor]) -> FlatOptimizer:
    """The flat optimizer of a run, holding `weights` (fp32, by parameter name) in full precision.

    No weight decay for parameters with fewer than two dimensions, biases, and what FAIR's model lists in
    `no_weight_decay()` (its position embeddings); the same set as in FAIR's pre-training.

    Args:
        peak: the schedule's peak learning rate; Muon keeps optim.muon_lr in proportion to it.
    """
    exempt = no_decay_parameters(model)
    optimizer: FlatOptimizer
    if optim.name == "muon":
        optimizer = Muon(
            model.named_parameters(),
            muon=muon_parameters(model),
            lr=peak,
            muon_lr=optim.muon_lr,
            adjust_lr="original",
            momentum=optim.muon_momentum,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            no_decay=exempt,
        )
    else:
        optimizer = AdamW(
            model.named_parameters(),
            lr=peak,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            no_decay=exempt,
        )
    # The model was cast to its compute precision; the masters start from the weights as drawn.
    optimizer.load_master_parameters(weights)
    return optimizer


def checkpoint_tensors(optimizer: FlatOptimizer) -> dict[str, Tensor]:
    """What a checkpoint holds: `model.<name>` and `optim.<slot>.<name>`, whole, whatever the number of
    ranks. Views of the live tensors: copy them before the next step.
    """
    tensors = {f"model.{name}": t for name, t in optimizer.master_parameters(copy=False).items()}
    return tensors | {f"optim.{name}": t for name, t in optimizer.state_dict(copy=False).items()}


def checkpoint_meta(config: RunConfig, step: int) -> dict[str, Any]:
    """The JSON stored beside the tensors."""
    return {
        "format": FORMAT,
        "step": step,
        "samples": step * config.train.global_batch,
        "seed": config.run.seed,
        "model": config.model.model_dump(mode="json"),
        "optimizer": config.optim.name,
        "versions": {"torch": torch.__version__, "hiera-train": metadata.version("hiera-train")},
    }


def restore(path: Path, optimizer: FlatOptimizer) -> None:
    """Loads weights and optimizer state from a checkpoint that has been verified.

    Raises:
        UserError: it belongs to another model or optimizer, or this node cannot read it.
    """
    try:
        saved = load_tensors(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); all nodes must share run.dir") from error
    check_same_shapes(path, saved, checkpoint_tensors(optimizer))
    optimizer.load_master_parameters(_strip(saved, "model."))
    optimizer.load_state_dict(_strip(saved, "optim."))


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
