"""Weights of a run for FAIR's own classes: `.pth` as FAIR publishes them, or `.safetensors`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hiera_optim.state_dict import clean_state_dict
from service.config.checks import WEIGHT_SUFFIXES
from service.errors import EXIT_FINISHED, UserError
from service.files import replacing
from service.train.checkpoint import load_tensors
from service.train.reconstruct import find_checkpoint


def write_weights(weights: Mapping[str, Tensor], to: Path) -> None:
    """Write a state dict whole or not at all.

    `.pth` holds {"model_state": weights}, what FAIR's `pretrained_model` loader reads, and nothing but
    tensors, so that torch.load(weights_only=True) takes it. `.safetensors` holds the tensors by name.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    if to.suffix not in WEIGHT_SUFFIXES:
        raise UserError(f"--to: {to} must end in {' or '.join(WEIGHT_SUFFIXES)}")
    try:
        with replacing(to) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode
            if to.suffix == ".pth":
                torch.save({"model_state": dict(weights)}, temporary)
            else:
                save_file(dict(weights), temporary, metadata={"format": "pt"})
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            # safetensors makes files that only their owner may read; give them what the umask gives any other.
            temporary.chmod(mode)
    # torch and safetensors raise their own kinds when the disk is full or the folder is not there.
    except Exception as error:
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        else:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"--to: cannot write {to}: {reason}") from error


def main(run_dir: Path, to: Path, step: int | None = None) -> int:
    """`hiera-train export`: write the weights of the newest checkpoint, or of one step; the exit code.

    Raises:
        UserError: there is no such checkpoint, or the file cannot be written.
    """
    step, checkpoint = find_checkpoint(run_dir, step)
    write_weights(clean_state_dict(load_tensors(checkpoint, "model.")), to)
    print(f"{to}: weights after step {step}")
    return EXIT_FINISHED
