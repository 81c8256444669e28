"""What several values, the data or the world size have to agree on: everything known before a GPU is taken.

Each rule about the model says in one line what FAIR's model would otherwise fail with late and obscurely
(a reshape, a broadcast, a division by zero) or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from service.config.data_checks import check_data, check_pictures_fit
from service.config.geometry import kept_mask_units, mask_unit_count, size_divisors
from service.config.schema import ModelSection, RunConfig
from service.errors import UserError

WEIGHT_SUFFIXES = (".pth", ".safetensors")
"""Files of weights, as `hiera-train export` writes them."""
LARGEST_ON_GPU = 256
"""Samples of a micro-batch that nobody chose: enough to keep a GPU busy, few enough to fit one."""
LARGEST_ON_CPU = 32
_PER_DIMENSION = ("q_stride", "mask_unit_size", "patch_kernel", "patch_stride", "patch_padding")


class BatchSplit(NamedTuple):
    """How the global batch is computed on a number of ranks."""

    micro_batch: int
    """Samples a rank computes at once."""
    accumulation: int
    """Micro-batches of a rank in an optimizer step."""


def check_settings(config: RunConfig) -> None:
    """Everything that the configuration alone can tell. UserError, one line that names the field."""
    check_model(config.model)
    _check_channels(config)
    _check_schedule(config)
    # what one rank cannot divide, several cannot either
    check_world(config, 1)


def check_all(config: RunConfig) -> None:
    """`check_settings`, and the data as far as it can be judged without decoding it."""
    check_settings(config)
    check_data(config)
    _check_start(config)


def check_world(config: RunConfig, world_size: int, on_cpu: bool | None = None) -> BatchSplit:
    """How `world_size` ranks share the global batch; UserError with the nearest values if they cannot.

    Without train.micro_batch a rank's share is cut into the largest equal parts that are not above a size
    that most machines hold; `on_cpu` is which kind these are, by default what runtime.device says.
    """
    if world_size < 1:
        raise UserError(f"world size: {world_size} is not a whole number above 0")
    batch, micro = config.train.global_batch, config.train.micro_batch
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    unit = world_size * (micro or 1)
    if batch % unit:
        by = f"{ranks} x micro_batch {micro} = {unit}" if micro else ranks
        nearest = " or ".join(str(value) for value in _neighbours(batch, unit))
        raise UserError(f"train.global_batch: {batch} does not divide by {by}; nearest valid: {nearest}")
    if micro is None:
        share = batch // world_size
        on_cpu = config.runtime.device == "cpu" if on_cpu is None else on_cpu
        largest = LARGEST_ON_CPU if on_cpu else LARGEST_ON_GPU
        micro = max(size for size in range(1, min(share, largest) + 1) if share % size == 0)
    return BatchSplit(micro, batch // (world_size * micro))


def check_model(model: ModelSection) -> None:
    """Whether FAIR's MaskedAutoencoderHiera can be built and run with these sizes and this mask ratio."""
    _check_dimensions(model)
    _check_stages(model)
    _check_sizes(model)
    _check_target(model)
    _check_mask_ratio(model)


def _check_dimensions(model: ModelSection) -> None:
    dimensions = len(model.input_size)
    for name in _PER_DIMENSION:
        values: Sequence[int] = getattr(model, name)
        if len(values) != dimensions:
            raise UserError(
                f"model.{name}: {list(values)} has {_count(len(values), 'value')} but model.input_size "
                f"{list(model.input_size)} has {_count(dimensions, 'dimension')}"
            )
    if model.sep_pos_embed and dimensions != 3:
        raise UserError(f"model.sep_pos_embed: true needs 3-D input, model.input_size is {dimensions}-D")


def _check_stages(model: ModelSection) -> None:
    stages = len(model.stages)
    if len(model.mask_unit_attn) != stages:
        raise UserError(
            f"model.mask_unit_attn: {_count(len(model.mask_unit_attn), 'value')} for "
            f"{_count(stages, 'stage')}; give one a stage"
        )
    if model.q_pool >= stages:
        raise UserError(f"model.q_pool: {model.q_pool} must be less than the number of stages, {stages}")
    for dim_field, heads_field in (("embed_dim", "num_heads"), ("decoder_embed_dim", "decoder_num_heads")):
        dim, heads = getattr(model, dim_field), getattr(model, heads_field)
        if dim % heads:
            nearest = " or ".join(str(value) for value in _neighbours(dim, heads))
            raise UserError(
                f"model.{dim_field}: {dim} does not divide by model.{heads_field} {heads}; nearest valid: {nearest}"
            )


def _check_sizes(model: ModelSection) -> None:
    pools = len(model.stages) - 1
    unit = [q**pools for q in model.q_stride]
    if list(model.mask_unit_size) != unit:
        raise UserError(
            f"model.mask_unit_size: {list(model.mask_unit_size)} must be q_stride^(stages - 1) = {unit} "
            "for masked autoencoding"
        )
    divisors = size_divisors(model)
    if any(size % divisor for size, divisor in zip(model.input_size, divisors, strict=True)):
        bad = {s: _neighbours(s, d) for s, d in zip(model.input_size, divisors, strict=True) if s % d}
        nearest = ", ".join(f"{size} -> {' or '.join(map(str, near))}" for size, near in bad.items())
        raise UserError(
            f"model.input_size: {list(model.input_size)} does not divide by {list(divisors)} "
            f"(patch_stride x q_stride^{pools}); nearest valid: {nearest}"
        )
    patches = zip(model.patch_kernel, model.patch_stride, model.patch_padding, strict=True)
    for kernel, stride, padding in patches:
        # Exactly the paddings with which the convolution gives input_size / patch_stride tokens.
        if not kernel - stride <= 2 * padding < kernel:
            least, most = math.ceil(max(kernel - stride, 0) / 2), (kernel - 1) // 2
            if least > most:
                remedy = "has no valid padding; give another patch_kernel"
            else:
                remedy = f"must be {least}" if least == most else f"must be {least} to {most}"
            raise UserError(
                f"model.patch_padding: {padding} with patch_kernel {kernel} and patch_stride {stride} "
                f"{remedy} (for input_size / patch_stride tokens)"
            )


def _check_target(model: ModelSection) -> None:
    """FAIR predicts square patches of single frames, of the last dimension's side."""
    sides = [p * q**model.q_pool for p, q in zip(model.patch_stride, model.q_stride, strict=True)]
    if len(sides) >= 2 and sides[-2] != sides[-1]:
        raise UserError(
            f"model.q_stride: {list(model.q_stride)} with patch_stride {list(model.patch_stride)} predicts "
            f"patches of {sides[-2]} x {sides[-1]}; FAIR's reconstruction target must be square"
        )
    if len(sides) == 3 and model.q_stride[0] != 1 and model.q_pool > 0:
        raise UserError(
            f"model.q_stride: {list(model.q_stride)} pools over time, which FAIR's reconstruction target "
            f"cannot; use {[1, *model.q_stride[1:]]} with mask_unit_size {[1, *model.mask_unit_size[1:]]}"
        )


def _check_mask_ratio(model: ModelSection) -> None:
    units = mask_unit_count(model)
    if units < 2:
        divisors = list(size_divisors(model))
        raise UserError(
            f"model.input_size: {list(model.input_size)} is a single mask unit of {divisors}; "
            "masked autoencoding needs at least 2"
        )
    kept = kept_mask_units(units, model.mask_ratio)
    if kept < 1:
        largest = math.floor(1000 * (1 - 1 / units)) / 1000
        while kept_mask_units(units, largest) < 1:  # 10 * (1 - 0.9) is 0.9999...
            largest = round(largest - 0.001, 3)
        raise UserError(
            f"model.mask_ratio: {model.mask_ratio} keeps 0 of {units} mask units; "
            f"at least 1 must be kept, so {largest} at most"
        )
    if kept >= units:
        raise UserError(f"model.mask_ratio: {model.mask_ratio} hides none of {units} mask units; raise it")


def _check_channels(config: RunConfig) -> None:
    model, data = config.model, config.data
    if data.kind == "images":
        check_pictures_fit(model)
    for name in ("mean", "std"):
        values = getattr(data, name)
        if values is not None and len(values) != model.in_chans:
            raise UserError(
                f"data.{name}: {_count(len(values), 'value')} for model.in_chans {model.in_chans}; "
                "give one a channel, or null for mean and std"
            )


def _check_schedule(config: RunConfig) -> None:
    optim, train = config.optim, config.train
    peak = optim.peak_lr(train.global_batch)
    if optim.min_lr > peak:
        raise UserError(f"optim.min_lr: {optim.min_lr:g} is above the peak learning rate, {peak:g}")
    warmup = optim.warmup_steps
    if train.steps is not None and warmup is not None and warmup >= train.steps:
        raise UserError(f"optim.warmup_steps: {warmup} must be less than train.steps {train.steps}")
    both_in_epochs = train.steps is None and warmup is None
    if both_in_epochs and train.epochs is not None and optim.warmup_epochs >= train.epochs:
        raise UserError(f"optim.warmup_epochs: {optim.warmup_epochs:g} must be less than train.epochs {train.epochs:g}")
    chosen = train.activation_checkpointing
    if isinstance(chosen, tuple):
        stages = len(config.model.stages)
        beyond = [stage for stage in chosen if stage >= stages]
        if beyond:
            raise UserError(
                f"train.activation_checkpointing: there is no stage {beyond[0]}; the stages are 0 to {stages - 1}"
            )


def _check_start(config: RunConfig) -> None:
    path = config.train.init_from
    # What a run started from may be gone by the time it resumes.
    if path is None or any((config.run.directory / "checkpoints").glob("step-*")):
        return
    if path.is_dir():
        if not any((path / "checkpoints").glob("step-*.safetensors")):
            raise UserError(f"train.init_from: {path} is not a run directory with checkpoints; give one, or a file")
    elif not path.exists():
        raise UserError(f"train.init_from: {path} does not exist")
    elif path.suffix not in WEIGHT_SUFFIXES:
        raise UserError(f"train.init_from: {path} must end in {' or '.join(WEIGHT_SUFFIXES)}")


def _neighbours(value: int, divisor: int) -> list[int]:
    """The nearest positive multiples of `divisor` below and above `value`."""
    below = value // divisor * divisor
    return [candidate for candidate in (below, below + divisor) if candidate > 0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
