"""Pictures of what the autoencoder reconstructs: original, masked and reconstructed, side by side.

The model predicts hidden patches normalised by each patch's own mean and standard deviation, which it does
not know. As in the papers' figures (He et al., "Masked Autoencoders Are Scalable Vision Learners", 2021),
predictions are brought back with the *true* mean and standard deviation of each hidden patch, and visible
patches are pasted: the pictures show how well structure inside patches is predicted, and flatter brightness
and colour of whole patches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hiera_optim.geometry import Geometry
from hiera_optim.masks import sample_mask, unwrap
from service.config.load import load_config
from service.config.schema import RunConfig
from service.data import Source, open_data, validation
from service.errors import EXIT_FINISHED, UserError
from service.train.checkpoint import (
    DamagedCheckpoint,
    check_same_shapes,
    checkpoint_path,
    list_checkpoints,
    load_tensors,
    newest_whole,
    verify,
)
from service.train.drawing import draw_samples, save_png

SAMPLES = 8
"""Held-out samples in one file."""


def to_patches(x: Tensor, geom: Geometry) -> Tensor:
    """Cut samples into prediction patches in FAIR's order: [B, C, *size] -> [B, N, F].

    N is row-major in space; F is (C, y, x) for pictures, (y, x, C) for clips, (s, C) for signals. Of clips,
    only the frames that FAIR's loss looks at are taken, every `geom.frame_stride`-th one.
    """
    p, (B, C) = geom.pred_stride, x.shape[:2]
    if geom.spatial_dims == 1:
        return x.view(B, C, -1, p).permute(0, 2, 3, 1).flatten(2)
    if geom.spatial_dims == 2:
        h, w = (n // p for n in x.shape[2:])
        return x.view(B, C, h, p, w, p).permute(0, 2, 4, 1, 3, 5).reshape(B, h * w, -1)
    x = x[:, :, :: geom.frame_stride]
    t, h, w = x.shape[2], x.shape[3] // p, x.shape[4] // p
    return x.reshape(B, C, t, h, p, w, p).permute(0, 2, 3, 5, 4, 6, 1).reshape(B, t * h * w, -1)


def from_patches(patches: Tensor, geom: Geometry) -> Tensor:
    """Inverse of `to_patches`: [B, N, F] -> [B, C, *size], clips with the frames that were taken."""
    p, B, C = geom.pred_stride, len(patches), geom.in_chans
    if geom.spatial_dims == 1:
        return patches.view(B, -1, p, C).permute(0, 3, 1, 2).flatten(2)
    h, w = (n // p for n in geom.input_size[-2:])
    if geom.spatial_dims == 2:
        return patches.view(B, h, w, C, p, p).permute(0, 3, 1, 4, 2, 5).reshape(B, C, h * p, w * p)
    x = patches.view(B, -1, h, w, p, p, C).permute(0, 6, 1, 2, 4, 3, 5)
    return x.reshape(B, C, -1, h * p, w * p)


def hidden_tokens(mask: Tensor, geom: Geometry) -> Tensor:
    """Which prediction tokens are masked: keep mask [B, M] of mask units -> bool [B, N], row-major in
    space."""
    hidden = ~mask.view(-1, *geom.mask_units_shape)
    for dim, size in enumerate(geom.final_unit_shape):
        hidden = hidden.repeat_interleave(size, dim=dim + 1)
    return hidden.flatten(1)


def paste(x: Tensor, pred: Tensor, mask: Tensor, geom: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Put predictions into the samples they belong to.

    Args:
        x: float32 [B, C, *size].
        pred: [B * masked tokens, F] in FAIR's order, as the model returns it.
        mask: bool [B, M], True where a mask unit was seen.

    Returns:
        (original, reconstructed, hidden): float32 [B, C, *shown] twice and bool [B, *shown], where `shown`
        is the input size, for clips with only the frames that are predicted. Where hidden is False, both
        are equal.
    """
    patches = to_patches(x, geom)
    hidden = hidden_tokens(mask, geom)
    # FAIR's label: unbiased variance, 1e-6 added to it.
    mean = patches.mean(dim=-1, keepdim=True)
    deviation = (patches.var(dim=-1, keepdim=True) + 1e-6) ** 0.5
    made = patches.clone()
    made[hidden] = pred.to(patches.dtype) * deviation[hidden] + mean[hidden]
    spread = hidden.unsqueeze(-1).expand_as(patches)
    return from_patches(patches, geom), from_patches(made, geom), from_patches(spread, geom)[:, 0]


@torch.no_grad()
def write_pictures(
    model: nn.Module,
    x: Tensor,
    sample_ids: Tensor,
    path: Path,
    *,
    seed: int,
    mask_ratio: float,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> None:
    """Reconstruct samples and write a PNG with one row for each.

    Args:
        model: MaskedAutoencoderHiera, FAIR's or optimised, in any precision on any device.
        x: float32 [B, C, *input_size], normalised by mean and std.
        sample_ids: int64 [B]; with the seed they give the masks, the same as in training and validation.
        path: where to write; its folder is made.
        mean, std: of each channel; None: x was not normalised.

    Raises:
        UserError: the file cannot be written.
    """
    geom = Geometry.from_model(unwrap(model))
    weight = next(model.parameters())
    x, sample_ids = x.to(weight.device), sample_ids.to(weight.device)
    mask, _, _ = sample_mask(sample_ids, geom.num_mask_units, geom.num_kept_for_loss(mask_ratio), seed)
    training = model.training
    model.eval()
    try:
        _, pred, _, _ = model(x.to(weight.dtype), mask_ratio, mask=mask)
    finally:
        model.train(training)
    original, made, hidden = paste(x.float(), pred.float(), mask, geom)
    original, made = (denormalise(part, mean, std).cpu() for part in (original, made))
    save_png(draw_samples(original.numpy(), made.numpy(), hidden.cpu().numpy()), path)


def picture_path(run_dir: Path, step: int) -> Path:
    """Where the reconstructions after `step` optimizer steps are drawn."""
    return run_dir / "reconstructions" / f"step-{step:08d}.png"


def draw_held_out(model: nn.Module, source: Source, path: Path, config: RunConfig) -> None:
    """`write_pictures` of SAMPLES samples of `source`, or all it has: the same at every call.

    Raises:
        UserError: the file cannot be written.
    """
    count = min(SAMPLES, len(source))
    x, sample_ids, _ = next(validation(source, micro_batch=count, rank=0, world_size=1, samples=count))
    write_pictures(
        model,
        x,
        sample_ids,
        path,
        seed=config.run.seed,
        mask_ratio=config.model.mask_ratio,
        mean=config.data.mean,
        std=config.data.std,
    )


def denormalise(x: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """x [B, C, ...] * std + mean, by channel."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    if std is not None:
        x = x * torch.tensor(std, dtype=x.dtype, device=x.device).view(shape)
    if mean is not None:
        x = x + torch.tensor(mean, dtype=x.dtype, device=x.device).view(shape)
    return x


def find_checkpoint(run_dir: Path, step: int | None) -> tuple[int, Path]:
    """(step, path) of a whole checkpoint of a run: of that step, or the newest.

    Raises:
        UserError: there is none, or the one of that step is damaged.
    """
    folder = run_dir / "checkpoints"
    if step is None:
        found = newest_whole(folder, lambda line: print(f"hiera-train: warning: {line}", file=sys.stderr))
        if found is None:
            raise UserError(f"{folder} holds no checkpoint yet; train first, or give another run directory")
        return found
    path = checkpoint_path(folder, step)
    if not path.exists():
        steps = ", ".join(str(number) for number, _ in list_checkpoints(folder)) or "none"
        raise UserError(f"--step {step}: no such checkpoint in {folder}; there are: {steps}")
    try:
        verify(path)
    except (DamagedCheckpoint, OSError) as error:
        raise UserError(f"{path} cannot be used ({error}); take another --step") from error
    return step, path


def main(run_dir: Path, *, step: int | None = None) -> int:
    """`hiera-train reconstruct`: write reconstructions/step-<step>.png in the run directory; the exit code.

    Runs on the CPU, so that it can look at a run that is training.

    Raises:
        UserError: there is no checkpoint, it is of another model, or the data is gone.
    """
    # Here, not above: export and the trainer use the rest of this module without it.
    from service.train.model import build_fair_model, build_model

    config = load_config(run_dir / "run.yaml")
    step, checkpoint = find_checkpoint(run_dir, step)
    fair = build_fair_model(config.model, config.run.seed)
    weights = load_tensors(checkpoint, "model.")
    check_same_shapes(checkpoint, weights, fair.state_dict())
    fair.load_state_dict(weights)
    model = build_model(config.train, fair, torch.device("cpu"), "fp32")
    train, held_out = open_data(config.data, config.model, seed=config.run.seed)
    source = train if held_out is None else held_out
    path = picture_path(run_dir, step)
    draw_held_out(model, source, path, config)
    print(path)
    return EXIT_FINISHED
