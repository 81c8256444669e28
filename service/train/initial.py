"""train.init_from: weights of another run, or of FAIR, as the start of a new one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hiera_optim.state_dict import (
    clean_state_dict,
    interpolate_position_embeddings,
    only_input_size_differs,
    state_dict_mismatches,
)
from service.config.schema import TrainSection
from service.errors import UserError
from service.train.checkpoint import DamagedCheckpoint, load_tensors, read_meta, verify
from service.train.reconstruct import find_checkpoint


def initial_weights(section: TrainSection, model: nn.Module) -> dict[str, Tensor]:
    """The weights that train.init_from names, fp32 on the CPU, by parameter name.

    Args:
        model: the run's model; only the shapes of its parameters are read.

    Raises:
        UserError: they cannot be read or are of another model; of another input size, unless
            train.interpolate_position_embeddings resamples them.
    """
    path = section.init_from
    assert path is not None
    try:
        weights, input_size = _read(path)
        weights = clean_state_dict(weights)
        if section.interpolate_position_embeddings:
            weights = interpolate_position_embeddings(weights, model, input_size=input_size)
    except ValueError as error:
        raise UserError(f"train.init_from: {path}: {error}") from error
    lines = state_dict_mismatches(model, weights)
    if lines:
        more = f" (and {len(lines) - 1} more differ)" if len(lines) > 1 else ""
        if only_input_size_differs(weights, model.state_dict()):
            remedy = "set train.interpolate_position_embeddings=true to start from weights of another input size"
        else:
            remedy = "give the model section that they were trained with"
        raise UserError(f"train.init_from: {path} does not fit: {lines[0]}{more};\n{remedy}")
    return {name: weight.float() for name, weight in weights.items()}


def _read(path: Path) -> tuple[Mapping[str, Any], list[int] | None]:
    """Weights and, where a checkpoint says it, the input size they were trained on."""
    checkpoint = find_checkpoint(path, None)[1] if path.is_dir() else path
    try:
        if checkpoint.suffix == ".pth":
            return _read_pth(checkpoint), None
        weights = load_tensors(checkpoint, "model.")
        if not weights:
            return load_tensors(checkpoint), None
        verify(checkpoint)
        try:
            return weights, read_meta(checkpoint)["model"]["input_size"]
        except (LookupError, TypeError) as error:
            raise UserError(
                f"train.init_from: {checkpoint} does not say what model it is of;\n"
                "give a checkpoint as a run writes it, or weights alone"
            ) from error
    except OSError as error:
        raise UserError(f"train.init_from: {checkpoint} cannot be read: {error.strerror or error}") from error
    except (DamagedCheckpoint, SafetensorError) as error:
        raise UserError(f"train.init_from: {checkpoint} is damaged or no .safetensors file: {error}") from error


def _read_pth(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (MemoryError, OSError):
        raise
    # Whatever torch's reader of archives and its unpickler meet in a file that is not one.
    except Exception as error:
        raise UserError(f"train.init_from: {path} is not a whole .pth file of weights alone") from error
    named = content.get("model_state", content) if isinstance(content, Mapping) else {}
    if not isinstance(named, Mapping) or not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise ValueError("it does not hold weights by name, as FAIR's model_state does")
    return named
