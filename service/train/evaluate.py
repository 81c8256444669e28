"""Validation on the held-out split, always with the same samples and the same masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hiera_optim.training import TrainStep
from service.data import Source, validation
from service.train.workers import Workers


@dataclass(frozen=True)
class Validation:
    """Result over all ranks."""

    loss: float
    trivial_loss: float
    """Loss of predicting every patch's mean."""
    samples: int


def evaluate(
    step: TrainStep,
    source: Source,
    *,
    micro_batch: int,
    workers: Workers,
    samples: int,
    threads: int,
    stopping: Callable[[], bool],
) -> Validation | None:
    """Mean loss over at most `samples` held-out samples, on all ranks together.

    Masks depend on (seed, sample id) as in training, so two validations differ by the weights alone.

    Args:
        stopping: asked once a batch, equally often on all ranks; True ends the validation, the same on all
        ranks.

    Returns:
        None when stopped.
    """
    geometry, count = step.geometry, 0
    loss, trivial = torch.zeros(2, dtype=torch.float64, device=workers.device)
    batches = validation(
        source,
        micro_batch=micro_batch,
        rank=workers.rank,
        world_size=workers.world_size,
        samples=samples,
        threads=threads,
        pin=workers.device.type == "cuda",
    )
    for x, sample_ids, real in batches:
        if stopping():
            return None
        if real:
            x = x[:real].to(workers.device, non_blocking=True)
            loss += step.evaluate(x, sample_ids[:real]).double() * real
            trivial += trivial_loss(x, geometry.pred_stride, geometry.frame_stride) * real
            count += real
    totals = workers.total([float(loss), float(trivial), float(count)])
    return Validation(totals[0] / totals[2], totals[1] / totals[2], int(totals[2]))


def trivial_loss(x: Tensor, patch: int, frame_stride: int) -> Tensor:
    """Loss of predicting each patch's mean: below 1 only by the unbiased variance and by patches of one
    colour.

    Labels are normalised by each patch's mean m and unbiased variance v, as (p - m) / sqrt(v + 1e-6) over
    its n values (FAIR's get_pixel_label_2d), so this is the mean over patches of (n - 1) / n * v / (v +
    1e-6). Over all patches, masked or not.

    Args:
        x: [N, C, *size].
        patch: side of a prediction patch (the last two dimensions, or the only one).
        frame_stride: in 3-D only every such frame is predicted.

    Returns:
        0-d float64 on the device of x.
    """
    if x.ndim == 5:
        x = x[:, :, ::frame_stride].transpose(1, 2).flatten(0, 1)
    dims = x.ndim - 2
    for dim in range(dims):
        x = x.unfold(2 + dim, patch, patch)
    # [N, C, *grid, *patch] -> [N, *grid, C * patch values]
    values = x.movedim(1, 1 + dims).flatten(1 + dims)
    n = values.shape[-1]
    variance = values.var(dim=-1)
    return (variance / (variance + 1e-6)).double().mean() * (n - 1) / n
