"""What a configuration would run, in a few lines for people: `--dry-run` and `config check`."""

from __future__ import annotations

import math

from service.config.checks import check_world
from service.config.geometry import kept_mask_units, mask_unit_count, parameter_count, token_shape
from service.config.schema import ModelSection, RunConfig


def summary(config: RunConfig, nnodes: int) -> list[str]:
    """Lines "name: what"; the batch split only where the number of processes is known."""
    data, train, optim = config.data, config.train, config.optim
    peak = optim.peak_lr(train.global_batch)
    return [
        f"run:    {config.run.name} in {config.run.directory}",
        *_model(config.model),
        f"data:   {data.kind}{'' if data.path is None else f' {data.path}'}",
        f"optim:  {optim.name}, peak learning rate {peak:g}, warm-up {_warmup(config)}",
        f"train:  {_length(config)}, global batch {train.global_batch}, {_split(config, nnodes)}",
    ]


def _model(model: ModelSection) -> list[str]:
    tokens, units = token_shape(model), mask_unit_count(model)
    kept = kept_mask_units(units, model.mask_ratio)
    product = f"{_by(tokens)} = " if len(tokens) > 1 else ""
    millions = parameter_count(model) / 1e6
    return [
        f"model:  {millions:.1f} M parameters, input {model.in_chans} x {_by(model.input_size)}",
        f"        {product}{math.prod(tokens)} tokens, {kept} of {units} mask units kept",
    ]


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _length(config: RunConfig) -> str:
    steps, epochs = config.train.steps, config.train.epochs
    return f"{steps} steps" if steps is not None else f"{epochs:g} epochs"


def _warmup(config: RunConfig) -> str:
    steps = config.optim.warmup_steps
    return f"{steps} steps" if steps is not None else f"{config.optim.warmup_epochs:g} epochs"


def _split(config: RunConfig, nnodes: int) -> str:
    workers = config.runtime.nproc_per_node
    if workers == "auto":
        micro = config.train.micro_batch
        return f"micro-batch {micro}" if micro is not None else "shared equally by all ranks"
    micro, accumulation = check_world(config, nnodes * workers)
    return f"{nnodes * workers} ranks x {accumulation} micro-batches of {micro}"
